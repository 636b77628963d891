"""Evaluate a fitted model on test images, beside other detectors."""
