"""One task of each name, with thresholds of it and outputs for it."""

from __future__ import annotations

import numpy as np

from psc_core.target import Target
from psc_core.tasks.classification import decide as classification
from psc_core.tasks.classification.policy import ClassificationPolicy
from psc_core.tasks.classification.task import Classification
from psc_core.tasks.decide import BaseThresholds
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression import decide as regression
from psc_core.tasks.regression.policy import RegressionPolicy
from psc_core.tasks.regression.task import Regression
from psc_core.tasks.task import Task

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


def drawn(task: Task, gates: tuple[str, ...]) -> Outputs[FloatArray]:
    """Outputs of 40 images."""
    names = task.heads[next(iter(task.heads))].score_names
    columns = len(names) + task.probabilities(CLASSES) + len(gates)
    return Outputs(np.random.default_rng(0).random((40, columns), np.float32), names, gates)
