"""Fit maps: moments over positions, the Gaussian and its grey levels, and test images with a pasted patch."""
