"""Encoded images to fixed-size ``uint8`` arrays: limits, decoding, preprocessing."""
