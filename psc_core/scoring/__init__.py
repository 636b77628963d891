"""``psc-score``: every output for a folder, a list or a Parquet column of images, offline, part by part."""

from __future__ import annotations

from typing import Final

TABLE_FORMATS: Final = ("jsonl", "parquet")
"""Formats of the parts, the default first."""
