"""Choose the training images that a model keeps thumbnails of."""
