"""Conformal calibration: p-values, thresholds and prediction sets with guaranteed rates.

Nothing else was chosen on the calibration split, and its scores come through the served pipeline.  So scores of
calibration images and of future in-distribution images are exchangeable and, with n calibration images,

* p-value: ``(1 + #{calibration OOD scores ≥ this one}) / (n + 1)``; calling an image out-of-distribution
  when its p-value is at most α is a false alarm for at most a fraction α of in-distribution images (Vovk et al. 2005);
* the smallest p-value is ``1 / (n + 1)``: a smaller α could never raise an alarm and is rejected;
* prediction set with coverage 1 − α: the classes whose probability is at least the k-th largest
  calibration probability of a true label, ``k = ⌈(n + 1)(1 − α)⌉`` (score ``1 − p_y``: Sadinle et al. 2019).
  It holds the true label with probability ≥ 1 − α, over all images (marginal).  The most probable class is always
  in the set, which can only raise coverage.

All comparisons are between float32 scores as they were produced, without rounding in between.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.errors import BundleError, UsageError
from psc_core.policy import Policy
from psc_core.rates import check_fraction, ood_rank, tolerant_ceil

TOLERANCE: Final = 1e-4
"""Of float32 entropies and probabilities beyond their range."""

MAXIMUM_SCORE: Final = 1e12
"""Largest OOD score, nats, that a calibration may hold; no density gives one near it."""


@dataclass(frozen=True)
class Thresholds:
    """A policy in terms of the outputs, for one set of calibration images."""

    policy: Policy
    ood_p_value: float  # an image is out of distribution when its p-value is at most this
    label_probability: float  # the smallest with which a class is in a prediction set


@dataclass(frozen=True)
class Calibration:
    """Scores of n calibration images, float32, each sorted for itself."""

    ood_scores: Float[Tensor, " n"]  # OOD scores, ascending, nats
    entropies: Float[Tensor, " n"]  # predictive entropies, ascending, nats
    label_probabilities: Float[Tensor, " n"]  # of the true label, ascending
    labels: Int[Tensor, " n"]  # the true label of each entry of label_probabilities
    num_classes: int  # K

    def __len__(self) -> int:
        return len(self.ood_scores)

    def thresholds(self, policy: Policy) -> Thresholds:
        """What a policy means here.

        Raises:
            UsageError: n is too small for its alpha or its coverage.
        """
        return Thresholds(policy, decision_p_value(policy.alpha, len(self)), self.set_threshold(policy.coverage))

    def ood_score_threshold(self, alpha: float) -> float:
        """The OOD score (nats) above which an image's p-value is at most α.

        ``p ≤ α ⇔ OOD score > threshold``, exactly, also where the rounding of p matters.

        Raises:
            UsageError: ``alpha`` is not in (0, 1) or below ``1 / (n + 1)``.
        """
        return ood_score_threshold(self.ood_scores, alpha)

    def set_threshold(self, coverage: float) -> float:
        """The smallest probability with which a class is in a prediction set (:mod:`psc_core.model.decision`).

        Raises:
            UsageError: ``coverage`` is not in (0, 1), or n is too small for it.
        """
        check_rates(len(self), coverage=coverage)
        rank = tolerant_ceil((len(self) + 1) * coverage)
        return self.label_probabilities[len(self) - rank].item()

    def tensors(self) -> dict[str, Tensor]:
        """The scores by name, for a safetensors file; OOD scores negated: of a density, log densities."""
        return {
            "scores": -self.ood_scores.flip(0),
            "entropies": self.entropies,
            "label_probabilities": self.label_probabilities,
            "labels": self.labels,
            "num_classes": torch.tensor(self.num_classes),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Inverse of :meth:`tensors`.

        Raises:
            BundleError: A tensor is missing, has another type or length, or its scores do not ascend or are not finite.
        """
        expected = {"scores", "entropies", "label_probabilities", "labels", "num_classes"}
        if set(tensors) != expected:
            raise BundleError(f"expected calibration tensors {sorted(expected)}, got {reprlib.repr(sorted(tensors))}")
        scores = [tensors[name] for name in ("scores", "entropies", "label_probabilities")]
        labels, classes = tensors["labels"], tensors["num_classes"]
        whole = all(
            part.dtype == torch.float32 and part.ndim == 1 and part.isfinite().all()
            and (part.diff() >= 0).all() for part in scores
        )  # fmt: skip
        if not whole or len({len(part) for part in [*scores, labels]}) != 1 or len(labels) == 0:
            raise BundleError(
                "expected ascending finite float32 calibration scores of one length, got "
                f"{[(str(part.dtype), tuple(part.shape)) for part in scores]}; fit it again"
            )
        if classes.dtype != torch.int64 or classes.ndim:
            raise BundleError(f"expected one int64 num_classes of the calibration, got {classes.dtype} {classes.shape}")
        if labels.dtype != torch.int64 or labels.ndim != 1 or labels.min() < 0 or labels.max() >= classes:
            raise BundleError(
                f"expected int64 calibration labels 0 … {int(classes) - 1}, got {labels.dtype} "
                f"{int(labels.min())} … {int(labels.max())}; fit it again"
            )
        limits = ((-MAXIMUM_SCORE, MAXIMUM_SCORE), (0.0, math.log(max(int(classes), 1))), (0.0, 1.0))
        for name, part, (low, high) in zip(("scores", "entropies", "label_probabilities"), scores, limits, strict=True):
            if part[0] < low - TOLERANCE or part[-1] > high + TOLERANCE:
                raise BundleError(
                    f"expected calibration {name} from {low:g} to {high:g}, got {float(part[0]):g} to "
                    f"{float(part[-1]):g}; fit it again"
                )
        return cls(-scores[0].flip(0), scores[1], scores[2], labels, int(classes))


def conformal_p_values(
    ascending: Float[Tensor, "*gates n"], ood_score: Float[Tensor, "*gates batch"]
) -> Float[Tensor, "*gates batch"]:
    """``(1 + #{calibration ≥ this}) / (n + 1)``, float32, by binary search; the smallest possible one for NaN.

    Args:
        ascending: OOD scores of the calibration images, sorted; or readings, each gate's for itself.
        ood_score: OOD scores of the images to test, the same float type.
    """
    count = ascending.shape[-1] + 1
    return (count - torch.searchsorted(ascending, ood_score)) / count  # NaN sorts above everything


def ood_score_threshold(ascending: Float[Tensor, " n"], alpha: float) -> float:
    """The OOD score above which a p-value among ``ascending`` scores is at most α; raises :class:`UsageError`."""
    check_rates(len(ascending), alpha=alpha)
    rank = ood_rank(alpha, len(ascending))
    return ascending[len(ascending) - min(rank, len(ascending))].item()  # alpha within rounding of 1 gives rank n + 1


def decision_p_value(alpha: float, n: int) -> float:
    """Half a step of 1/(n + 1) above the largest p-value ≤ α, so that rounding cannot matter.

    Raises:
        UsageError: n is too small for ``alpha``.
    """
    check_rates(n, alpha=alpha)
    return (ood_rank(alpha, n) + 0.5) / (n + 1)


def check_rates(n: int, *, alpha: float | None = None, coverage: float | None = None) -> None:
    """Reject the rates, of those given, that n calibration images cannot keep.

    Raises:
        UsageError: One is not in (0, 1), ``alpha`` is below ``1 / (n + 1)``, or ``coverage`` above ``n / (n + 1)``.
    """
    if alpha is not None:
        check_fraction(alpha, "alpha")
        if ood_rank(alpha, n) < 1:
            needed = tolerant_ceil(1 / max(alpha, 1e-300)) - 1
            raise UsageError(
                f"expected alpha ≥ 1/(n + 1) = {1 / (n + 1):.3g} with n = {n} calibration images, got {alpha:g}: no "
                "p-value is smaller than 1/(n + 1), so no image could be called out-of-distribution; raise alpha or "
                f"calibrate with at least {needed} images"
            )
    if coverage is not None:
        check_fraction(coverage, "coverage")
        if tolerant_ceil((n + 1) * coverage) > n:
            needed = tolerant_ceil(coverage / (1 - coverage))
            raise UsageError(
                f"expected coverage ≤ n/(n + 1) with n = {n} calibration images, got {coverage:g}; lower it or "
                f"calibrate with at least {needed} images"
            )
