"""Thumbnails: training images that a model keeps, small, to show what an image is nearest to."""
