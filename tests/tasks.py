"""One task of each name, with thresholds of it and outputs for it."""

from __future__ import annotations

import numpy as np

from psc_core.answers import ClassificationPolicy, RegressionPolicy, Target
from psc_core.tasks import classification, regression
from psc_core.tasks.base import BaseThresholds, FloatArray, Outputs, Task
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression

CLASSES = ("a", "b", "c")
ONE_OF_EACH: dict[str, tuple[Task, BaseThresholds]] = {
    "regression": (
        Regression(target=Target(name="angle", unit="degrees")),
        regression.Thresholds(RegressionPolicy(alpha=0.05, max_width=2.0, coverage=0.9), 0.05, 2.0),
    ),
    "classification": (
        Classification(),
        classification.Thresholds(ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9), 0.05, 0.2),
    ),
}
"""A task of each name, and thresholds of it."""


def drawn(task: Task, checks: tuple[str, ...]) -> Outputs[FloatArray]:
    """Outputs of 40 images."""
    names = task.heads[next(iter(task.heads))].score_names
    columns = len(names) + task.probabilities(CLASSES) + len(checks)
    return Outputs(np.random.default_rng(0).random((40, columns), np.float32), names, checks)
