"""Fit a calibration: keep the scores of calibration images, and choose the ambiguity threshold among them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import count as count_from
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from scipy import stats
from torch import Tensor

from psc_core.conformal import check_finite, check_fraction, equal_scores, thinned, tolerant_ceil
from psc_core.tasks.classification.calibration import Calibration

CONFIDENCE: Final = 0.95
"""Probability over calibration sets with which the error rate of accepted images is kept."""

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
        weights: How many images each stands for, see :mod:`psc_core.conformal`; None where all are equal.

    Raises:
        FitError: If scores are not finite.
    """
    given = probabilities.gather(1, labels[:, None])[:, 0].float()
    check_finite({"OOD scores": ood_score, "entropies": entropy, "probabilities": given})
    order = equal_scores(-given, weights).flip(0)
    entropies = entropy.float()[equal_scores(entropy.float(), weights)]
    drawn = slice(None) if weights is None else thinned(weights)  # Bounds need independent images.
    errors = Errors.of(entropy.float()[drawn], (probabilities.argmax(1) == labels)[drawn])
    return Calibration(
        ood_scores=ood_score.float()[equal_scores(ood_score.float(), weights)],
        entropies=entropies,
        error_bounds=errors.bounds_at(entropies),
        label_probabilities=given[order],
        labels=labels[order],
        num_classes=probabilities.shape[1],
    )


class Errors(NamedTuple):
    """How many images are accepted, and how many of these are wrong, by thresholds of the entropy.

    The thresholds are the entropies of n images, ascending; of equal ones the last, as these are accepted together.
    """

    entropies: Float[Tensor, " m"]  # nats, float64
    accepted: Int[Tensor, " m"]
    wrong: Int[Tensor, " m"]

    @classmethod
    def of(cls, entropy: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> Errors:
        """Count them from the predictive entropies and whether the most probable class was the label."""
        ascending, order = entropy.double().sort(stable=True)
        last = torch.cat([ascending[1:] > ascending[:-1], torch.ones(1, dtype=torch.bool)])[: len(ascending)]
        wrong = (~correct)[order].cumsum(0)
        return cls(ascending[last], torch.arange(1, len(ascending) + 1)[last], wrong[last])

    def bounds(self, confidence: float) -> Float[Tensor, " m"]:
        """Return the Clopper–Pearson bound on the error rate of the images below each threshold, float64.

        Given the k-th smallest entropy the k − 1 images below it are independent draws from all images below it; its
        own image counts as an error of these if it is one.
        """
        correct_below = (self.accepted - 1 - self.wrong).clamp(min=0)
        return torch.from_numpy(stats.beta.ppf(confidence, self.wrong + 1, correct_below)).nan_to_num(nan=1.0)

    def bounds_at(self, thresholds: Float[Tensor, " t"]) -> Float[Tensor, " t"]:
        """Return the bounds, with :data:`CONFIDENCE`, below any ascending thresholds, float32; 1 where none is."""
        bounds = torch.cat([torch.ones(1, dtype=torch.float64), self.bounds(CONFIDENCE)])
        return bounds[torch.searchsorted(self.entropies, thresholds.double(), right=True)].float()

    def threshold(self, risk: float, confidence: float = CONFIDENCE) -> float | None:
        """Return the largest entropy below which images are wrong at a rate of at most ``risk``, in nats.

        With ``confidence`` over calibration sets this holds.  The entropies are tested as thresholds in ascending
        order, each by its bound, until one fails (fixed-sequence testing: Bauer 1991; Angelopoulos et al. 2021): every
        test has its level, and a threshold that is too large passes only if the first one that is does.

        Returns:
            ``None`` if no threshold passes: too many errors, or too few images.

        Raises:
            UsageError: If ``risk`` is outside (0, 1).
        """
        check_fraction(risk, "risk")
        count = int(self.accepted[-1]) if len(self.accepted) else 0
        largest = tolerant_ceil((count + 1) * LARGEST_QUANTILE)
        tested = (self.accepted >= first_test(count, risk, confidence)) & (self.accepted <= largest)
        passed = int((self.bounds(confidence)[tested] <= risk).cumprod(0).sum())
        return float(self.entropies[tested][passed - 1]) if passed else None

    def lowest(self, risks: Sequence[float]) -> tuple[float, float] | None:
        """Return the lowest of ``risks`` that a threshold keeps, and that threshold; None if none of them is kept.

        Each is tested with the confidence 1 − (1 − :data:`CONFIDENCE`) / m of m risks (Bonferroni), so that the one
        which is chosen holds with :data:`CONFIDENCE`.
        """
        confidence = 1 - (1 - CONFIDENCE) / len(risks)
        found = ((risk, self.threshold(risk, confidence)) for risk in sorted(risks))
        return next(((risk, threshold) for risk, threshold in found if threshold is not None), None)


def first_test(count: int, risk: float, confidence: float = CONFIDENCE) -> int:
    """Return the number of images that the smallest threshold accepts.

    It is four times as many as pass without an error, so that a single one does not end the tests, but at most half of
    the images where half of them are enough.
    """
    minimum = fewest(risk, confidence)
    return max(minimum, min(4 * minimum, count // 2))


def fewest(risk: float, confidence: float = CONFIDENCE) -> int:
    """Return the number of images that pass without an error."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - risk)) + 1


def fewest_to_show(risk: float) -> int:
    """Return the number of images that show a threshold if none is wrong: a test accepts only a part of them."""
    return next(n for n in count_from(fewest(risk)) if tolerant_ceil((n + 1) * LARGEST_QUANTILE) >= fewest(risk))
