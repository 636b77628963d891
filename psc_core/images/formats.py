"""File names that are taken for images where a folder is searched."""

from __future__ import annotations

from typing import Final

SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""In lower case."""
