"""One number for each image."""

from __future__ import annotations

from typing import Final

NOUN: Final = "regression"
"""The word for a model of the task in messages."""
