"""The words of the report of a model of several labels."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.report import words

TEXTS: Final[words.Texts] = {
    "collapse": (
        "Where the network collapses",
        "PSC reads the shaded layer, which still varies and tells labels apart.",
    ),
    **words.TEXTS,
    "entropies": ("How uncertain labels are", "The entropy of the least certain label of each image."),
}
"""Titles and explanations of all figures, in the order of the page."""

NO_LIMIT: Final[Mapping[str, str]] = {}
"""Explanations of figures whose limit does not exist."""

COLUMNS: Final = {"accuracy": "labels right", "exact": "all right"}
"""Metrics that are shown and their titles."""

GLOSSARY: Final[Mapping[str, str]] = {
    **words.GLOSSARY,
    "undecided": "A label of which both values are possible at the nominal coverage.",
}

TEST_IMAGES: Final = "images/test"
"""The test images that a command names as an example."""
