"""The words of a regression's report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from psc_core.report import words

TEXTS: Final[words.Texts] = {
    "collapse": (
        "Where the network collapses",
        "Deep layers forget how images with about the same number differ (NC1 falls). PSC reads the shaded layer: it "
        "still varies, NC1 > ε, and predicts the number, high R².",
    ),
    "sizes": words.TEXTS["sizes"],
    "ood-scores": words.TEXTS["ood-scores"],
    "deviations": (
        "How uncertain numbers are",
        "Right of the dashed line an interval is too wide, and a number that is not out of distribution is uncertain.",
    ),
    "roc": words.TEXTS["roc"],
    "predictions": ("Predicted and true numbers", "A point is an image; on the diagonal its number is right."),
    "coverage": (
        "Do intervals hold?",
        "On the diagonal, 80 % of the intervals with coverage 80 % contain the true number; below it intervals are too "
        "narrow. On validation images the stated ones lie there by construction; see whether they do on test images.",
    ),
    "error-coverage": (
        "Does the uncertainty know?",
        "RMSE when the numbers with the largest predicted deviation are left to a person; it should rise to the right.",
    ),
}
"""The title and explanation of each figure, in the order of the page."""

NO_LIMIT: Final = {"deviations": "No width is too wide for an interval, so no number is uncertain."}
"""The explanations of figures whose limit does not exist."""

COLUMNS: Final = {"rmse": "RMSE", "r2": "R²", "nll": "NLL, nats", "crps": "CRPS"}
"""The metrics that are shown, with their titles; RMSE and CRPS are in the target's unit."""

GLOSSARY: Final[Mapping[str, str]] = {
    "bin": "Numbers between two quantiles of the training images; bins take the place of classes.",
    **words.GLOSSARY,
    "gate": "A reading with its own p-value: texture (early layer), kind (candidate layer).",
    "R²": "Fraction of the variance of the numbers that is explained: 1 is perfect, 0 no better than their mean.",
    "NC4": "How often the nearest bin mean is that of the number's bin, on validation images.",
    "interval": "Contains the true number with the nominal coverage, on images like the calibration images.",
    "predicted deviation": "Standard deviation that a prediction gives itself: noise, and what more data would remove.",
    "RMSE": "Root mean squared error, in the unit of the number.",
    "NLL": "Mean of −log(predicted density of the true number); lower is better. Nats.",
    "CRPS": "Mean distance of the predicted distribution from the true number, in its unit; lower is better.",
}

TEST_IMAGES: Final = "images/test.csv"
"""The test images in example commands."""
