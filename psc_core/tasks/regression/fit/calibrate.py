"""Fit the calibration of a regression: keep the scores of calibration images."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from psc_core.conformal import check_finite, equal_scores
from psc_core.tasks.regression.calibration import Calibration


def fit_calibration(
    ood_score: Float[Tensor, " n"],
    mean: Float[Tensor, " n"],
    deviation: Float[Tensor, " n"],
    values: Float[Tensor, " n"],
    weights: Float[Tensor, " n"] | None = None,
) -> Calibration:
    """Collect the scores of calibration images, as the served pipeline computes them.

    Args:
        ood_score: Nats, higher is more out-of-distribution.
        mean: μ, in the target's unit.
        deviation: σ, in the target's unit.
        values: y, in the target's unit.
        weights: How many images each stands for, see :mod:`psc_core.conformal`; None where all are equal.

    Raises:
        FitError: If scores are not finite.
    """
    residuals = ((values.double() - mean.double()).abs() / deviation.double()).float()
    check_finite({"OOD scores": ood_score, "residuals": residuals})
    scores = (ood_score.float(), residuals)
    return Calibration(*(part[equal_scores(part, weights)] for part in scores))
