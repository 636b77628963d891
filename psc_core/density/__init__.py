"""Feature densities: how ordinary is z?  One interface, five kinds (see :mod:`.gaussian`).

``fit_density`` fits one (:mod:`.fit`), ``restore_density`` rebuilds one from a bundle.  To add a kind:
subclass :class:`Density` with its ``layout``, fit it in :mod:`.fit`, and list it in ``DENSITIES``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from psc_core.bundle.module import restore
from psc_core.density.fit import DENSITIES, fit_density, kind_of
from psc_core.density.gaussian import Density, DensityExplanation, DensityOutput

__all__ = ["DENSITIES", "Density", "DensityExplanation", "DensityOutput", "fit_density", "kind_of", "restore_density"]


def restore_density(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> Density:
    """Inverse of ``density.config()`` and ``density.state_dict()``; raises :class:`BundleError`."""
    return restore(DENSITIES, config, state)
