"""One class of several for each image."""

from __future__ import annotations

from typing import Final

NOUN: Final = "classifier"
"""The word for a model of the task in messages."""
