"""Fit a calibration: keep the scores of calibration images, and choose the ambiguity threshold among them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.calibration.conformal import Calibration, check_fraction, tolerant_ceil
from psc_core.errors import FitError


def fit_calibration(
    ood_score: Float[Tensor, " n"],
    entropy: Float[Tensor, " n"],
    probabilities: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
) -> Calibration:
    """Collect the scores of calibration images, as the served pipeline gave them.

    Args:
        ood_score: Nats, higher is more out-of-distribution.
        entropy: Predictive entropies, nats.
        probabilities: Of each class.
        labels: One true label for each image.  An image with several labels counts once, with any of them: repeated
            images would make n too large, and the guarantees void.

    Raises:
        FitError: Scores that are not finite.
    """
    given = probabilities.gather(1, labels[:, None])[:, 0].float()
    for name, scores in (("OOD scores", ood_score), ("entropies", entropy), ("probabilities", given)):
        if not scores.isfinite().all():
            raise FitError(
                f"expected finite {name} of calibration images, got "
                f"{int((~scores.isfinite()).sum())} that are not; check the precision"
            )
    order = given.argsort(stable=True)
    return Calibration(
        scores=ood_score.float().sort().values,
        entropies=entropy.float().sort().values,
        label_probabilities=given[order],
        labels=labels[order],
        num_classes=probabilities.shape[1],
    )


def ambiguity_threshold(
    entropy: Float[Tensor, " n"], correct: Bool[Tensor, " n"], *, risk: float, quantile: float = 0.95
) -> float:
    """The predictive entropy (nats) above which an image counts as ambiguous.

    The largest entropy h such that the images of entropy at most h are wrong at a rate of at most ``risk``,
    counted as (errors + 1) / (images + 1); but at most the ``quantile`` of all entropies, so that even a
    classifier without errors abstains on its most uncertain images.  Where no h satisfies the risk, it is the quantile.

    Args:
        entropy: Of calibration images.
        correct: Whether the most probable class was the label.
        risk: Error rate among accepted images, in (0, 1).
        quantile: In (0, 1).

    Raises:
        UsageError: ``risk`` or ``quantile`` is outside (0, 1).
    """
    check_fraction(risk, "risk")
    check_fraction(quantile, "quantile")
    ascending, order = entropy.double().sort(stable=True)
    wrong = (~correct)[order].double().cumsum(0)
    rates = (wrong + 1) / (torch.arange(1, len(entropy) + 1, device=entropy.device) + 1)
    # Images of equal entropy are accepted together.
    last = torch.cat([ascending[1:] > ascending[:-1], torch.ones(1, dtype=torch.bool, device=entropy.device)])
    kept = ((rates <= risk) & last).nonzero()[:, 0]
    limit = float(ascending[min(len(entropy), tolerant_ceil((len(entropy) + 1) * quantile)) - 1])
    return min(limit, float(ascending[kept[-1]])) if len(kept) else limit
