"""Feature densities: log p of the training features, which are z or features averaged over positions.

One interface (:mod:`.base`), six kinds (:mod:`.gaussian`).

``restore_density`` rebuilds one from a bundle, :func:`psc_core.density.fit.density.fit_density` fits one.
To add a kind: subclass :class:`Density` with its ``layout``, list it in ``DENSITIES``, fit it in :mod:`.fit.density`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

from psc_core.density.base import Density, DensityExplanation, DensityOutput
from psc_core.density.gaussian import (
    ClasswiseDensity,
    PooledDensity,
    RelativeDensity,
    TiedDensity,
    UnitLengthDensity,
    UnitLengthTiedDensity,
)
from psc_core.fitted import restore

__all__ = ["DENSITIES", "Density", "DensityExplanation", "DensityOutput", "restore_density"]

DENSITIES: Final[Mapping[str, type[Density]]] = {
    density.kind: density
    for density in (
        ClasswiseDensity,
        TiedDensity,
        UnitLengthDensity,
        UnitLengthTiedDensity,
        PooledDensity,
        RelativeDensity,
    )
}
"""Densities by kind."""


def restore_density(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Density:
    """Inverse of ``density.config()`` and ``density.state_dict()``.

    Raises:
        BundleError: An unknown kind, or tensors that do not fit it.
    """
    return restore(DENSITIES, config, state)
