"""What ``predict`` of a model of several labels returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from psc_core.tasks.multilabel.answer import DECISIONS, LabelPrediction
from psc_core.tasks.multilabel.decide import Decisions
from psc_core.tasks.prediction import BasePrediction


@dataclass(frozen=True, repr=False, eq=False)
class MultilabelPrediction(BasePrediction):
    """Predictions of several labels for n images, on the CPU."""

    answer = LabelPrediction
    decision_names = DECISIONS

    decisions: Decisions

    @property
    def labels(self) -> tuple[tuple[str, ...], ...]:
        """The labels that hold, for each image."""
        return self._named(self.decisions.holds)

    @property
    def undecided(self) -> tuple[tuple[str, ...], ...]:
        """The labels that may as well be the other way, for each image."""
        return self._named(self.decisions.undecided)

    @property
    def probabilities(self) -> Tensor:
        """``float32 (n, K)``."""
        return self.outputs.probabilities

    def column(self, field: str) -> Sequence[Any] | Tensor:
        return self.probabilities if field == "probabilities" else super().column(field)

    def _named(self, chosen: npt.NDArray[np.bool_]) -> tuple[tuple[str, ...], ...]:
        return tuple(tuple(self.classes[k] for k in row.nonzero()[0].tolist()) for row in chosen)
