"""Encoded bytes to a fixed-size ``uint8`` array: limits, decoding, preprocessing."""
