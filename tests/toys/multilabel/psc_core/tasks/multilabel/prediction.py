"""What ``predict`` of a model of several labels returns."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from psc_core.tasks.multilabel.answer import MultilabelAnswer
from psc_core.tasks.multilabel.decide import Decisions
from psc_core.tasks.prediction import BasePrediction


@dataclass(frozen=True, repr=False, eq=False)
class MultilabelPrediction(BasePrediction):
    """Predictions of several labels for n images, on the CPU."""

    answer = MultilabelAnswer

    decisions: Decisions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels that hold, for each image."""
        return tuple(self._columns()["labels"])

    @property
    def undecided(self) -> tuple[tuple[str, ...], ...]:
        """The labels that may as well be the other way, for each image."""
        return tuple(self._columns()["undecided"])

    @property
    def probabilities(self) -> Tensor:
        """``float32 (n, K)``."""
        return self.outputs.probabilities
