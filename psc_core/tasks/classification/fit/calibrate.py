"""Fit a calibration: keep the scores of calibration images, and choose the ambiguity threshold among them."""

from __future__ import annotations

import math
from itertools import count as count_from
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from psc_core.calibration.conformal import check_finite
from psc_core.calibration.weighted import equal_scores
from psc_core.rates import check_fraction, tolerant_ceil
from psc_core.tasks.classification.calibration import Calibration

CONFIDENCE: Final = 0.95
"""Probability over calibration sets with which the error rate of unambiguous images is kept."""

LARGEST_QUANTILE: Final = 0.95
"""Largest threshold, a quantile of the entropies: even a perfect classifier abstains on its most uncertain images."""


def fit_calibration(
    ood_score: Float[Tensor, " n"],
    entropy: Float[Tensor, " n"],
    probabilities: Float[Tensor, "n classes"],
    labels: Int[Tensor, " n"],
    weights: Float[Tensor, " n"] | None = None,
) -> Calibration:
    """Collect the scores of calibration images, as the served pipeline computes them.

    Args:
        ood_score: Nats, higher is more out-of-distribution.
        entropy: Predictive entropies, nats.
        probabilities: Class probabilities of each image.
        labels: One true label for each image.  An image with several labels counts once, with any of them: repeated
            images would make n too large, and the guarantees void.
        weights: How many images each stands for, see :mod:`psc_core.calibration.weighted`; None where all are equal.

    Raises:
        FitError: If scores are not finite.
    """
    given = probabilities.gather(1, labels[:, None])[:, 0].float()
    check_finite({"OOD scores": ood_score, "entropies": entropy, "probabilities": given})
    order = equal_scores(-given, weights).flip(0)
    return Calibration(
        ood_scores=ood_score.float()[equal_scores(ood_score.float(), weights)],
        entropies=entropy.float()[equal_scores(entropy.float(), weights)],
        label_probabilities=given[order],
        labels=labels[order],
        num_classes=probabilities.shape[1],
    )


def ambiguity_threshold(entropy: Float[Tensor, " n"], correct: Bool[Tensor, " n"], *, risk: float) -> float | None:
    """Return the predictive entropy (nats) above which an image counts as ambiguous.

    With :data:`CONFIDENCE` over calibration sets, images of at most this entropy are wrong at a rate of at most
    ``risk``.  The entropies are tested as thresholds in ascending order, each by the Clopper–Pearson bound on the error
    rate of the images below it, until one fails (fixed-sequence testing: Bauer 1991; Angelopoulos et al. 2021).  Given
    the k-th smallest entropy the k − 1 images below it are independent draws from all images below it, so every
    test has its level, and a threshold that is too large passes only if the first one that is does.

    Args:
        entropy: Predictive entropy of calibration images.
        correct: Whether the most probable class was the label.
        risk: Error rate among accepted images, in (0, 1).

    Returns:
        ``None`` if no threshold passes: too many errors, or too few images.

    Raises:
        UsageError: If ``risk`` is outside (0, 1).
    """
    check_fraction(risk, "risk")
    count = len(entropy)
    ascending, order = entropy.double().sort(stable=True)
    errors = (~correct)[order].cumsum(0)
    accepted = torch.arange(1, count + 1)
    # Images of equal entropy are accepted together.
    last = torch.cat([ascending[1:] > ascending[:-1], torch.ones(1, dtype=torch.bool)])
    tested = last & (accepted >= first_test(count, risk)) & (accepted <= tolerant_ceil((count + 1) * LARGEST_QUANTILE))
    correct_below = (accepted - 1 - errors)[tested].clamp(min=0)
    bounds = torch.from_numpy(stats.beta.ppf(CONFIDENCE, errors[tested] + 1, correct_below)).nan_to_num(nan=1.0)
    passed = (bounds <= risk).cumprod(0).sum()
    return float(ascending[tested][passed - 1]) if passed else None


class NearestRisk(NamedTuple):
    """An error rate that a threshold keeps in place of the one that was asked for."""

    rate: float
    threshold: float  # of the predictive entropy, nats


def nearest_risk(entropy: Float[Tensor, " n"], correct: Bool[Tensor, " n"], *, risk: float) -> NearestRisk | None:
    """Return the smallest error rate above ``risk``, in hundredths, that a threshold keeps, and that threshold.

    The rate is chosen on these images, so the threshold guarantees nothing.

    Returns:
        ``None`` if there is none up to a half.
    """
    for rate in (step / 100 for step in range(1, 51) if step / 100 > risk):
        threshold = ambiguity_threshold(entropy, correct, risk=rate)
        if threshold is not None:
            return NearestRisk(rate, threshold)
    return None


def first_test(count: int, risk: float) -> int:
    """Return the number of images that the smallest threshold accepts.

    It is four times as many as pass without an error, so that a single one does not end the tests, but at most half of
    the images where half of them are enough.
    """
    minimum = fewest(risk)
    return max(minimum, min(4 * minimum, count // 2))


def fewest(risk: float) -> int:
    """Return the number of images that pass without an error."""
    return math.ceil(math.log(1 - CONFIDENCE) / math.log(1 - risk)) + 1


def fewest_to_show(risk: float) -> int:
    """Return the number of images that show a threshold if none is wrong: a test accepts only a part of them."""
    return next(n for n in count_from(fewest(risk)) if tolerant_ceil((n + 1) * LARGEST_QUANTILE) >= fewest(risk))
