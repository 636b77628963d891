"""Conformal calibration of several labels: p-values as for a classifier, and which labels are undecided.

With p_y the probability that an image's own label set gives to the true value of a label, n calibration images and
coverage 1 − α, a value of a label is possible where its probability is at least

    ``1 − t``,   t = the ⌈(n + 1)(1 − α)⌉-th smallest ``max over labels of 1 − p_y`` of the calibration images

and all true values of a future in-distribution image are possible with probability ≥ 1 − α (split conformal).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from psc_core.conformal import check_ascending, check_names, check_range, check_rates, conformal_rank
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.multilabel.decide import Thresholds


@dataclass(frozen=True)
class Calibration(BaseCalibration):
    """Scores of n calibration images, float32, each sorted for itself."""

    thresholds_type = Thresholds

    misses: Float[Tensor, " n"]  # of the label that is told worst, 1 minus the probability of its true value; ascending

    def quantile(self, coverage: float) -> float:
        """Return the smallest probability of a possible value of a label.

        Raises:
            UsageError: ``coverage`` is not in (0, 1), or n is too small for it.
        """
        check_rates(len(self), coverage=coverage)
        return 1 - float(self.misses[conformal_rank(coverage, len(self)) - 1])

    def tensors(self) -> dict[str, Tensor]:
        return {"ood_scores": self.ood_scores, "misses": self.misses}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        check_names(tensors, {"ood_scores", "misses"})
        scores = [tensors["ood_scores"], tensors["misses"]]
        check_ascending(scores)
        check_range("misses", tensors["misses"], 0.0, 1.0)
        return cls(*scores)
