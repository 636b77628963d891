"""A fitted model on test images, beside other detectors."""
