"""The words of a report: a title and an explanation for each figure, in the order of the page, and a glossary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Texts = Mapping[str, tuple[str, str]]

TEXTS: Final[Texts] = {
    "collapse": (
        "Where the network collapses",
        "Deep layers forget how images of a class differ (NC1 falls). PSC reads the shaded layer: it still varies, "
        "NC1 > ε, and tells the classes apart, high NC4.",
    ),
    "sizes": ("Size of the projection", "Squares mark the chosen number of components: the fewest that keep both."),
    "ood-scores": (
        "How unusual images are",
        "Right of the dashed line an image counts as out of distribution. Blue images belong left of it, orange ones "
        "right.",
    ),
    "entropies": (
        "How ambiguous images are",
        "Right of the dashed line an image that is not out of distribution counts as ambiguous.",
    ),
    "roc": ("Detection against false alarms", "How much is found at each rate of false alarms; up and left is better."),
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
"""Of a classifier's figures."""

GLOSSARY: Final[Mapping[str, str]] = {
    "NC1": "Variability within classes as a fraction of all variability: 1 without classes, 0 when a class is a point.",
    "NC4": "How often the nearest class mean is that of the label, on validation images.",
    "ε": "NC1 from which down a layer counts as collapsed.",
    "OOD score": "How unlike the training images an image is; higher is more unusual. Nats.",
    "alpha": "The rate of false alarms that the OOD threshold keeps on images like the validation images.",
    "predictive entropy": "How undecided the probabilities are: 0 when sure, log(classes) when all are equal.",
    "ambiguous": "In distribution, but with a predictive entropy above the threshold.",
    "NLL": "Mean of −log(probability of the label); lower is better. Nats.",
    "ECE": "Mean gap between confidence and accuracy; 0 is honest.",
    "made-up images": "Validation images turned, binarised, framed …, to see what happens without OOD images.",
    "gate": "A reading with its own p-value: texture (early layer), kind (candidate layer), confidence (entropy).",
}
"""Of a classifier's page."""
