"""Choose the training images of which a model keeps thumbnails."""
