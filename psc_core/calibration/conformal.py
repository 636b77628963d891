"""Conformal p-values, and the rates that calibration images guarantee.

Nothing was selected on the calibration split, and its scores come through the served pipeline.  So the scores of
calibration images and of future in-distribution images are exchangeable and, with n calibration images,

* p-value: ``(1 + #{calibration OOD scores ≥ this one}) / (n + 1)``; calling an image out-of-distribution
  when its p-value is at most α is a false alarm for at most a fraction α of in-distribution images (Vovk et al. 2005);
* the smallest p-value is ``1 / (n + 1)``: a smaller α could never raise an alarm and is rejected.

All comparisons are between float32 scores as the pipeline produced them, without rounding in between.
"""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import BundleError, FitError, UsageError
from psc_core.rates import check_fraction, conformal_rank, ood_rank, tolerant_ceil

MAX_SCORE: Final = 1e12
"""Maximum OOD score of a calibration, in nats; no density comes near it."""


def conformal_p_values(
    ascending: Float[Tensor, "*gates n"], ood_score: Float[Tensor, "*gates batch"]
) -> Float[Tensor, "*gates batch"]:
    """Return ``(1 + #{calibration ≥ this}) / (n + 1)``, float32, by binary search; for NaN the smallest p-value.

    Args:
        ascending: The sorted OOD scores of the calibration images, or the sorted readings of each gate.
        ood_score: The OOD scores of the images to test, of the same dtype.
    """
    count = ascending.shape[-1] + 1
    return (count - torch.searchsorted(ascending, ood_score)) / count  # NaN sorts above everything


def ood_score_threshold(ascending: Float[Tensor, " n"], alpha: float) -> float:
    """Return the OOD score above which the p-value is at most α; raise :class:`UsageError` if n is too small."""
    check_rates(len(ascending), alpha=alpha)
    rank = ood_rank(alpha, len(ascending))
    return ascending[len(ascending) - min(rank, len(ascending))].item()  # alpha within rounding of 1 gives rank n + 1


def decision_p_value(alpha: float, n: int) -> float:
    """Return a threshold half a step of 1/(n + 1) above the largest p-value ≤ α, so that rounding cannot matter.

    Raises:
        UsageError: If n is too small for ``alpha``.
    """
    check_rates(n, alpha=alpha)
    return (ood_rank(alpha, n) + 0.5) / (n + 1)


def check_rates(n: int, *, alpha: float | None = None, coverage: float | None = None) -> None:
    """Check that n calibration images can guarantee the given rates.

    Raises:
        UsageError: If a rate is not in (0, 1), ``alpha`` is below ``1 / (n + 1)`` or ``coverage`` above ``n / (n +
            1)``.
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
        if conformal_rank(coverage, n) > n:
            needed = tolerant_ceil(coverage / (1 - coverage))
            raise UsageError(
                f"expected coverage ≤ n/(n + 1) with n = {n} calibration images, got {coverage:g}; lower it or "
                f"calibrate with at least {needed} images"
            )


def check_finite(scores: Mapping[str, Tensor]) -> None:
    """Check that scores of calibration images are finite; ``scores`` maps the words for each to its values.

    Raises:
        FitError: If some are not finite.
    """
    for name, part in scores.items():
        if count := int((~part.isfinite()).sum()):
            raise FitError(
                f"expected finite {name} of calibration images, got {count} that are not; check the precision"
            )


def check_names(tensors: Iterable[str], expected: Set[str]) -> None:
    """Check that a calibration has exactly the expected tensors.

    Raises:
        BundleError: If a tensor is missing or unexpected.
    """
    if set(tensors) != expected:
        raise BundleError(f"expected calibration tensors {sorted(expected)}, got {reprlib.repr(sorted(tensors))}")


def check_ascending(scores: Sequence[Tensor]) -> None:
    """Check that scores are ascending finite float32 vectors of one length, at least one.

    Raises:
        BundleError: If they are not.
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
    """Check that ascending scores lie between ``low`` and ``high``, up to ``rounding``.

    Raises:
        BundleError: If some lie outside.
    """
    if ascending[0] < low - rounding or ascending[-1] > high + rounding:
        raise BundleError(
            f"expected calibration {name} from {low:g} to {high:g}, got {float(ascending[0]):g} to "
            f"{float(ascending[-1]):g}; fit it again"
        )
