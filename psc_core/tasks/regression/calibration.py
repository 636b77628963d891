"""Conformal calibration of a regression: p-values as for a classifier, and intervals with a guaranteed coverage.

Nothing else was chosen on the calibration split.  With y the true number of an image, μ its mean and
σ = √(aleatoric² + epistemic²), n calibration images and coverage 1 − α, the interval is

    ``[μ − q σ, μ + q σ]``,   q = the ⌈(n + 1)(1 − α)⌉-th smallest ``|y − μ| / σ`` of the calibration images

and contains the true number of a future in-distribution image with probability ≥ 1 − α, over all images (split
conformal with normalised residuals: Papadopoulos et al. 2002; Lei et al. 2018, section 5.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from psc_core.conformal import MAX_SCORE, check_ascending, check_names, check_range, check_rates, conformal_rank
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.regression.decide import Thresholds


@dataclass(frozen=True)
class Calibration(BaseCalibration):
    """Scores of n calibration images, float32, each sorted separately."""

    thresholds_type = Thresholds

    residuals: Float[Tensor, " n"]  # |y − μ| / σ, ascending

    def quantile(self, coverage: float) -> float:
        """Return q, half the width of an interval in standard deviations.

        Raises:
            UsageError: If ``coverage`` is not in (0, 1), or n is too small for it.
        """
        check_rates(len(self), coverage=coverage)
        return float(self.residuals[conformal_rank(coverage, len(self)) - 1])

    def tensors(self) -> dict[str, Tensor]:
        """Return the scores by name, for a safetensors file."""
        return {"ood_scores": self.ood_scores, "residuals": self.residuals}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Return the calibration whose :meth:`tensors` these are.

        Raises:
            BundleError: If a tensor is missing, has another type or length, or is not ascending, finite and in range.
        """
        check_names(tensors, {"ood_scores", "residuals"})
        scores = [tensors["ood_scores"], tensors["residuals"]]
        check_ascending(scores)
        for name, low in (("ood_scores", -MAX_SCORE), ("residuals", 0.0)):
            check_range(name, tensors[name], low, MAX_SCORE)
        return cls(*scores)
