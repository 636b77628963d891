"""The words of a classifier's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.report import words

TEXTS: Final[words.Texts] = {
    "collapse": (
        "Where the network collapses",
        "Deep layers forget how images of a class differ (NC1 falls). PSC reads the shaded layer: it still varies, "
        "NC1 > ε, and tells the classes apart, high NC4.",
    ),
    "sizes": words.TEXTS["sizes"],
    "ood-scores": words.TEXTS["ood-scores"],
    "entropies": (
        "How ambiguous images are",
        "Right of the dashed line an image that is not out of distribution counts as ambiguous.",
    ),
    "roc": words.TEXTS["roc"],
    "reliability": (
        "Is the confidence honest?",
        "On the diagonal, of the images with confidence 80 %, 80 % are right.",
    ),
    "risk-coverage": (
        "What abstaining gains",
        "Error rate when the least confident images are left to a person; lower is better.",
    ),
    "confusion": ("What is taken for what", "A row is a class, a column what was predicted for it."),
}
"""The title and explanation of each figure, in the order of the page."""

NO_LIMIT: Final = {"entropies": "No entropy is above the threshold, so no image is ambiguous."}
"""The explanations of figures whose limit does not exist."""

COLUMNS: Final = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}
"""The metrics that are shown, with their titles."""

GLOSSARY: Final[Mapping[str, str]] = {
    "NC1": words.GLOSSARY["NC1"],
    "NC4": "How often the nearest class mean is that of the label, on validation images.",
    "ε": words.GLOSSARY["ε"],
    "OOD score": words.GLOSSARY["OOD score"],
    "alpha": words.GLOSSARY["alpha"],
    "predictive entropy": "How undecided the probabilities are: 0 when sure, log(classes) when all are equal.",
    "ambiguous": "In distribution, but with a predictive entropy above the threshold.",
    "NLL": "Mean of −log(probability of the label); lower is better. Nats.",
    "ECE": "Mean gap between confidence and accuracy; 0 is honest.",
    "made-up images": words.GLOSSARY["made-up images"],
    "gate": "A reading with its own p-value: texture (early layer), kind (candidate layer), confidence (energy).",
}

TEST_IMAGES: Final = "images/test"
"""The test images in example commands."""
