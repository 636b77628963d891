"""Encoded images to fixed-size ``uint8`` arrays: limits, decoding, preprocessing."""

from __future__ import annotations

from typing import Final

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Ends of the file names, in lower case, that are taken for images where a folder is searched."""
