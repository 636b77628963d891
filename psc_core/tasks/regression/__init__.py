"""One number for each image."""
