"""Fit maps: moments over positions, the Gaussian and its grey levels, images with something pasted into them."""
