"""Several labels, each of which holds for an image or does not."""

from __future__ import annotations

from typing import Final

NOUN: Final = "multi-label model"
"""The word for a model of the task in messages."""
