"""Conformal p-values and the rates that calibration images guarantee.

Nothing else was chosen on the calibration split, and its scores come through the served pipeline.  So scores of
calibration images and of future in-distribution images are exchangeable and, with n calibration images,

* p-value: ``(1 + #{calibration OOD scores ≥ this one}) / (n + 1)``; calling an image out-of-distribution
  when its p-value is at most α is a false alarm for at most a fraction α of in-distribution images (Vovk et al. 2005);
* the smallest p-value is ``1 / (n + 1)``: a smaller α could never raise an alarm and is rejected.

All comparisons are between float32 scores as they were produced, without rounding in between.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import BundleError, FitError, UsageError
from psc_core.rates import check_fraction, ood_rank, tolerant_ceil

MAX_SCORE: Final = 1e12
"""Largest OOD score, nats, that a calibration may hold; no density gives one near it."""


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


def check_finite(scores: Mapping[str, Tensor]) -> None:
    """Require finite scores of calibration images, by their names in words.

    Raises:
        FitError: Some are not.
    """
    for name, part in scores.items():
        if count := int((~part.isfinite()).sum()):
            raise FitError(
                f"expected finite {name} of calibration images, got {count} that are not; check the precision"
            )


def check_names(tensors: Iterable[str], expected: Set[str]) -> None:
    """Require these tensors of a calibration.

    Raises:
        BundleError: There are others, or fewer.
    """
    if set(tensors) != expected:
        raise BundleError(f"expected calibration tensors {sorted(expected)}, got {reprlib.repr(sorted(tensors))}")


def check_ascending(scores: Sequence[Tensor]) -> None:
    """Require ascending finite float32 scores of one length, at least one.

    Raises:
        BundleError: They are something else.
    """
    whole = all(
        part.dtype == torch.float32 and part.ndim == 1 and part.isfinite().all()
        and (part.diff() >= 0).all() for part in scores
    )  # fmt: skip
    if not whole or len({len(part) for part in scores}) != 1 or len(scores[0]) == 0:
        raise BundleError(
            "expected ascending finite float32 calibration scores of one length, got "
            f"{[(str(part.dtype), tuple(part.shape)) for part in scores]}; fit it again"
        )


def check_range(name: str, ascending: Float[Tensor, " n"], low: float, high: float, *, rounding: float = 0.0) -> None:
    """Require ascending scores from ``low`` to ``high``, by which they may be missed by ``rounding``.

    Raises:
        BundleError: Some lie outside.
    """
    if ascending[0] < low - rounding or ascending[-1] > high + rounding:
        raise BundleError(
            f"expected calibration {name} from {low:g} to {high:g}, got {float(ascending[0]):g} to "
            f"{float(ascending[-1]):g}; fit it again"
        )
