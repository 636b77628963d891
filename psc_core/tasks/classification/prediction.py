"""The predictions that :meth:`psc_core.PSC.predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.tasks.classification.answer import ClassificationAnswer
from psc_core.tasks.classification.decide import Decisions
from psc_core.tasks.prediction import BasePrediction


@dataclass(frozen=True, repr=False, eq=False)
class ClassificationPrediction(BasePrediction):
    """Predictions of a classifier for n images, on the CPU.

    Every score of :class:`.answer.ClassificationAnswer` is an attribute, ``float32 (n,)``, as ``log_density``.

    Example:
        >>> from psc_core import PSC
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> prediction = PSC.load(bundle).predict([f"{bundle}/examples/clean.png"])
        >>> prediction.labels, prediction.prediction_set, prediction.predictive_entropy < 0.1
        (('7',), (('7',),), tensor([True]))
        >>> prediction
        ClassificationPrediction for 1 image: 1 accept
           label  confidence  entropy  log density  p-value  decision
        0      7       1.000    0.001      1147.28   0.8925    accept
    """

    answer = ClassificationAnswer

    decisions: Decisions

    @property
    def class_index(self) -> Tensor:
        """``int64 (n,)`` the most probable class."""
        return torch.from_numpy(self.decisions.class_index)

    @property
    def labels(self) -> tuple[str, ...]:
        """The name of the most probable class, for each image."""
        return tuple(self.decisions.labels(self.classes))

    @property
    def confidence(self) -> Tensor:
        """``float32 (n,)`` probability of the most probable class."""
        return torch.from_numpy(self.decisions.confidence)

    @property
    def probabilities(self) -> Tensor:
        """``float32 (n, K)`` probabilities of all classes."""
        return self.outputs.probabilities

    @property
    def prediction_set(self) -> tuple[tuple[str, ...], ...]:
        """The set of classes that contains the true one with the bundle's coverage, for each image."""
        return tuple(self._columns()["prediction_set"])
