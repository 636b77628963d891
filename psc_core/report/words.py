"""The words that the reports of all tasks share: names of predictors, explanations of figures, a glossary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Texts = Mapping[str, tuple[str, str]]  # the title and explanation of each figure, in the order of the page
PREDICTORS: Final = {"original": "the original network", "psc": "with PSC"}  # others keep their names

TEXTS: Final[Texts] = {
    "sizes": ("Size of the projection", "Squares mark the chosen number of components: the fewest that keep both."),
    "ood-scores": (
        "How unusual images are",
        "Right of the dashed line an image counts as out of distribution. Blue images belong left of it, orange ones "
        "right.",
    ),
    "roc": ("Detection against false alarms", "How much is found at each rate of false alarms; up and left is better."),
}

GLOSSARY: Final[Mapping[str, str]] = {
    "NC1": "Variability within classes as a fraction of all variability: 1 without classes, 0 when a class is a point.",
    "ε": "The NC1 below which a layer counts as collapsed.",
    "OOD score": "How unlike the training images an image is; higher is more unusual. Nats.",
    "alpha": "The rate of false alarms that the OOD threshold keeps on images like the calibration images, on average.",
    "synthetic OOD images": "Validation images turned, binarised, framed …, to see what happens without OOD images.",
}
