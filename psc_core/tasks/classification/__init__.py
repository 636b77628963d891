"""One class of several for each image."""
