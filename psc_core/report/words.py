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

VALUE_TEXTS: Final[Texts] = {
    "collapse": (
        "Where the network collapses",
        "Deep layers forget how images with about the same number differ (NC1 falls). PSC reads the shaded layer: it "
        "still varies, NC1 > ε, and tells the number, high R².",
    ),
    "sizes": TEXTS["sizes"],
    "ood-scores": TEXTS["ood-scores"],
    "deviations": (
        "How uncertain numbers are",
        "Right of the dashed line an interval is too wide, and a number that is not out of distribution is uncertain.",
    ),
    "roc": TEXTS["roc"],
    "predictions": ("Predicted and true numbers", "A point is an image; on the diagonal its number is right."),
    "coverage": (
        "Do intervals hold?",
        "On the diagonal, 80 % of the intervals with coverage 80 % hold the true number; below it intervals are too "
        "narrow. On validation images the stated ones lie there by construction; test images show whether they hold.",
    ),
    "error-coverage": (
        "Does the uncertainty know?",
        "RMSE when the numbers with the largest predicted deviation are left to a person; it should rise to the right.",
    ),
}
"""Of a regression's figures."""

NO_LIMIT: Final = {
    "entropies": "No threshold keeps the error rate, so no image is ambiguous.",
    "deviations": "No width is too wide for an interval, so no number is uncertain.",
}
"""Explanations of figures whose limit does not exist."""

_SHARED: Final = ("NC1", "ε", "OOD score", "alpha", "made-up images")

VALUE_GLOSSARY: Final[Mapping[str, str]] = {
    "bin": "Numbers between two quantiles of the training images; bins take the place of classes.",
    **{word: GLOSSARY[word] for word in _SHARED},
    "gate": "A reading with its own p-value: texture (early layer), kind (candidate layer).",
    "R²": "Fraction of the variance of the numbers that is explained: 1 is perfect, 0 no better than their mean.",
    "NC4": "How often the nearest bin mean is that of the number's bin, on validation images.",
    "interval": "Holds the true number with the nominal coverage, on images like the validation images.",
    "predicted deviation": "Standard deviation that a prediction gives itself: noise, and what more data would remove.",
    "RMSE": "Root mean squared error, in the unit of the number.",
    "NLL": "Mean of −log(predicted density of the true number); lower is better. Nats.",
    "CRPS": "Mean distance of the predicted distribution from the true number, in its unit; lower is better.",
}
"""Of a regression's page."""
