"""Feature densities: log p of the training features, which are z or features averaged over positions.

All have one interface (:mod:`.base`), and all six are mixtures of Gaussians (:mod:`.gaussian`).
:func:`.fit.density.fit_density` fits one, :func:`.base.restore_density` rebuilds one from a bundle.
To add a kind, subclass :class:`.base.Density` with its ``layout`` and list it in ``DENSITIES``; where none of the fits
in :mod:`.fit.density` gives its tensors, add one there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from psc_core.classes_by_name import ClassesByName

if TYPE_CHECKING:
    from psc_core.density.base import Density

DENSITIES: Final[Mapping[str, type[Density]]] = ClassesByName(
    {
        "gda": "psc_core.density.gaussian:ClasswiseDensity",
        "tied": "psc_core.density.gaussian:TiedDensity",
        "gda++": "psc_core.density.gaussian:UnitLengthDensity",
        "mahalanobis++": "psc_core.density.gaussian:UnitLengthTiedDensity",
        "pooled++": "psc_core.density.gaussian:PooledDensity",
        "rmd": "psc_core.density.gaussian:RelativeDensity",
    }
)
"""Densities by kind."""
