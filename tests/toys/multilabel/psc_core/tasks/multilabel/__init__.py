"""Several labels, each of which holds for an image or does not."""
