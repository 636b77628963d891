"""Conformal p-values, the rates that calibration images guarantee, and the ranks that these correspond to.

Nothing was selected on the calibration split, and its scores come through the served pipeline.  So its scores and those
of future in-distribution images are exchangeable and, with n calibration images,

* p-value: ``(1 + #{calibration OOD scores ≥ this one}) / (n + 1)``; calling an image out-of-distribution
  when its p-value is at most α is a false alarm for at most a fraction α of in-distribution images (Vovk et al. 2005);
* the smallest p-value is ``1 / (n + 1)``: a smaller α could never raise an alarm and is rejected.

All comparisons are between float32 scores as the pipeline produced them, without rounding in between.

Images of one population may be drawn with different probabilities.  Image i of n was drawn with probability π_i, so it
stands for ``w_i = 1 / π_i`` images.  The p-value of a new image with score s, in the original population, is

    ``p(s) = (w* + Σ_{s_i ≥ s} w_i) / (w* + Σ_i w_i)``,   w* = max_i w_i

(weighted conformal prediction: Tibshirani et al. 2019, Corollary 1).  The weight of the new image is unknown; the
largest weight makes p largest, so the rate is guaranteed.  A calibration holds scores that count equally, so n weighted
scores are stored as ``m = ⌊Σ w_i / w*⌋`` equal ones: among them ``(1 + #{kept ≥ s}) / (m + 1)`` is p(s) rounded up to
the next multiple of 1 / (m + 1).  With equal weights they are the n scores themselves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.errors import BundleError, FitError, UsageError
from psc_core.linalg import positions

RANK_ROUNDING: Final = 1e-9  # added before ⌊ ⌋ and subtracted before ⌈ ⌉, so that 0.29 × 100 counts as 29


def ood_rank(alpha: float, n: int) -> int:
    """Return the largest k with p-value k/(n + 1) ≤ ``alpha`` for n calibration images, or 0 if no k ≥ 1 has it."""
    return math.floor(alpha * (n + 1) + RANK_ROUNDING)


def conformal_rank(coverage: float, n: int) -> int:
    """Return ``⌈(n + 1) · coverage⌉``, the rank of the conformal quantile among n ascending scores; n + 1 is beyond."""
    return max(1, tolerant_ceil((n + 1) * coverage))  # The tolerance alone would give a tiny coverage rank 0.


def tolerant_ceil(value: float) -> int:
    return math.ceil(value - RANK_ROUNDING)


def check_fraction(value: float, name: str) -> None:
    if not 0.0 < value < 1.0:
        raise UsageError(f"expected {name} between 0 and 1, got {value}; 0.05 means five in a hundred")


MAX_SCORE: Final = 1e12  # maximum OOD score of a calibration, in nats; no density comes near it


def conformal_p_values(
    ascending: Float[Tensor, "*checks n"], ood_score: Float[Tensor, "*checks batch"]
) -> Float[Tensor, "*checks batch"]:
    """Return ``(1 + #{calibration ≥ this}) / (n + 1)``, float32, by binary search; for NaN the smallest p-value."""
    count = ascending.shape[-1] + 1
    return (count - positions(ascending, ood_score)) / count  # NaN sorts above everything


def ood_score_threshold(ascending: Float[Tensor, " n"], alpha: float) -> float:
    """Return the OOD score above which the p-value is at most α."""
    check_rates(len(ascending), alpha=alpha)
    rank = ood_rank(alpha, len(ascending))
    return ascending[len(ascending) - min(rank, len(ascending))].item()  # alpha within rounding of 1 gives rank n + 1


def decision_p_value(alpha: float, n: int) -> float:
    """Return a threshold half a step of 1/(n + 1) above the largest p-value ≤ α, so that rounding cannot matter."""
    check_rates(n, alpha=alpha)
    return (ood_rank(alpha, n) + 0.5) / (n + 1)


def check_rates(n: int, *, alpha: float | None = None, coverage: float | None = None) -> None:
    """Check that n calibration images can guarantee the given rates."""
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
        if conformal_rank(coverage, n) > n:
            needed = tolerant_ceil(coverage / (1 - coverage))
            raise UsageError(
                f"expected coverage ≤ n/(n + 1) with n = {n} calibration images, got {coverage:g}; lower it or "
                f"calibrate with at least {needed} images"
            )


def check_finite(scores: Mapping[str, Tensor]) -> None:
    for name, part in scores.items():
        if count := int((~part.isfinite()).sum()):
            raise FitError(
                f"expected finite {name} of calibration images, got {count} that are not; check the precision"
            )


def check_ascending(scores: Sequence[Tensor]) -> None:
    """Check that scores are ascending finite float32 vectors of one length, at least one."""
    whole = all(
        part.dtype == torch.float32 and part.ndim == 1 and part.isfinite().all() and (part.diff() >= 0).all()
        for part in scores
    )
    if not whole or len({len(part) for part in scores}) != 1 or len(scores[0]) == 0:
        raise BundleError(
            "expected ascending finite float32 calibration scores of one length, got "
            f"{[(str(part.dtype), tuple(part.shape)) for part in scores]}; fit it again"
        )


def check_range(name: str, ascending: Float[Tensor, " n"], low: float, high: float, *, rounding: float = 0.0) -> None:
    """Check that ascending scores lie between ``low`` and ``high``, up to ``rounding``."""
    if ascending[0] < low - rounding or ascending[-1] > high + rounding:
        raise BundleError(
            f"expected calibration {name} from {low:g} to {high:g}, got {float(ascending[0]):g} to "
            f"{float(ascending[-1]):g}; fit it again"
        )


def effective_count(weights: Float[Tensor, " n"]) -> int:
    """Return m, the number of equally weighted images that count as much as the weighted ones."""
    if not len(weights) or not (weights.isfinite() & (weights > 0)).all():
        raise UsageError("expected a positive finite weight for each of at least one image; give 1 / its probability")
    return int(float(relative(weights).sum()) + RANK_ROUNDING)


def relative(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``w_i / w*``, float64; an empty tensor for no weights."""
    return weights.double() / float(weights.max()) if len(weights) else weights.double()


def equal_scores(scores: Float[Tensor, " n"], weights: Float[Tensor, " n"] | None) -> Int[Tensor, " m"]:
    """Return the positions of the m scores to keep, ascending by score; all of them if there are no weights.

    A high score is unusual.  A position may occur several times if weights differ.
    """
    if weights is None:
        return scores.argsort(stable=True)
    kept, order = effective_count(weights), scores.argsort(descending=True, stable=True)
    sums = relative(weights)[order].cumsum(0)
    ranks = (1 + sums) * ((kept + 1) / (1 + float(sums[-1])))  # (m + 1) p of each score
    above = torch.searchsorted(ranks, torch.arange(1, kept + 1, dtype=ranks.dtype), right=True)
    return order[above.clamp(max=len(order) - 1)].flip(0)


def thin(weights: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Draw images that count equally, each with probability ``w_i / w*``, for methods that need independent images.

    If all weights are equal, every image is drawn.
    """
    drawn = torch.rand(len(weights), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn < relative(weights)
