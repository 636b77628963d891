"""Run a fitted model over many images: over a data set, or for ``psc-score`` over a folder or list, part by part."""

from __future__ import annotations

from typing import Final

TABLE_FORMATS: Final = ("jsonl", "parquet")
"""The formats of the parts, the default first."""
