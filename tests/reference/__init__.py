"""Naive float64 twins of the numeric packages: loops, dense matrices, one image and one class at a time."""
