"""A fitted model over many images: over a data set, and for ``psc-score`` over a folder or list, part by part."""

from __future__ import annotations

from typing import Final

TABLE_FORMATS: Final = ("jsonl", "parquet")
"""Formats of the parts, the default first."""
