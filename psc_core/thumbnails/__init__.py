"""Thumbnails: small training images that a model keeps, to show which of them an image is nearest to."""
