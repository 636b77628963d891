"""Turn encoded images into fixed-size ``uint8`` arrays: limits, decoding, preprocessing."""

from __future__ import annotations

from typing import Final

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""File name suffixes, in lower case, of the files in a folder that count as images."""
