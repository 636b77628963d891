"""Networks whose files describe their classes, the preparation of images and the location of the weights."""
