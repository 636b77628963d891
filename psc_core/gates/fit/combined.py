"""Fit the p-values of gates from readings of held-out in-distribution images."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.errors import FitError
from psc_core.gates.combined import TEXTURE, Gates
from psc_core.numerics.linalg import rounding_of
from psc_core.numerics.tail import TAIL_FRACTION, tail_excess

TEXTURE_COUNTS_BELOW: Final = 0.2
"""The p-value below which an anomalous texture counts along with other gates."""

MINIMUM_TAIL: Final = 5
"""Minimum number of readings for the scale of the tail, if there are as many."""


def fit_gates(
    names: Sequence[str], selection: Float[Tensor, "m gates"], calibration: Float[Tensor, "n gates"]
) -> Gates:
    """Fit gates to the readings of both halves of the validation images.

    Args:
        names: The names of the gates, in the order of the columns.
        selection: The readings to which ``p_g`` is fitted.
        calibration: The readings for the p-value of each gate.

    Raises:
        FitError: If a reading is not finite, or all readings of a gate are equal.
    """
    for part in (selection, calibration):
        if not part.isfinite().all():
            raise FitError("expected finite readings of the gates; check the precision")
    ascending = selection.float().sort(dim=0).values
    scales = tail_scales(ascending)
    if constant := [name for name, readings in zip(names, ascending.T, strict=True) if not vary(readings)]:
        raise FitError(f"expected readings that differ between images, those of {', '.join(constant)} are all equal")
    below = TEXTURE_COUNTS_BELOW if TEXTURE in names and len(names) > 1 else 1.0
    return Gates.of(names, ascending.T, scales, calibration.float().sort(dim=0).values.T, below)


def vary(readings: Float[Tensor, " m"]) -> bool:
    """Return whether readings differ by more than rounding."""
    return bool(readings.max() - readings.min() > rounding_of(readings.abs().max()))


def tail_scales(ascending: Float[Tensor, "m gates"]) -> Float[Tensor, " gates"]:
    """Return the mean excess of the k largest readings over the next smaller one, at least 1/1000 of the range.

    k is :data:`.TAIL_FRACTION` of the readings, at least :data:`MINIMUM_TAIL`, and less than their number.
    """
    count = len(ascending)
    k = max(1, min(count - 1, max(MINIMUM_TAIL, round(TAIL_FRACTION * count))))
    wide = ascending.double()
    return torch.maximum(tail_excess(wide, k), (wide[-1] - wide[0]) / 1000).float()
