"""Densities of version 1 of the bundle format: all in float32, so that its bundles answer as they always did.

The whitener of a class is affine, ``S_k^(−1/2) w + offset_k``: two large numbers cancel where classes are tight, which
is why version 2 (:mod:`.gaussian`) subtracts the class mean first.  Nothing fits these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core.density.base import Density
from psc_core.density.gaussian import RelativeDensity, TiedDensity

SERVE_ELEMENTS: Final = 1 << 26
"""Largest B × K × P block of whitened differences (256 MiB); larger batches are split."""


class _Version1(Density):
    schema = 1
    in_float64: ClassVar[frozenset[str]] = frozenset()


class ClasswiseVersion1(_Version1):
    """One covariance for each class; ``whiteners`` (K, P, P) are S_k^(−1/2), ``offsets`` −S_k^(−1/2) m_k."""

    kind = "gda"
    layout: ClassVar = {
        "mean": ("dim",),
        "basis": ("dim", "kept"),
        "whiteners": ("classes", "kept", "kept"),
        "offsets": ("classes", "kept"),
        "constants": ("classes",),
    }
    whiteners: Tensor
    offsets: Tensor

    def class_distances(self, w: Float[Tensor, "batch kept"]) -> Float[Tensor, "batch classes"]:
        """Mahalanobis distances: one matrix product (P → K · P) for all classes."""
        batch = max(1, SERVE_ELEMENTS // self.offsets.numel())
        if len(w) > batch:
            return torch.cat([self.class_distances(part) for part in torch.split(w, batch)])
        stacked = functional.linear(w, self.whiteners.flatten(0, 1), self.offsets.flatten())
        distances: Tensor = torch.linalg.vector_norm(stacked.view(-1, *self.offsets.shape), dim=2)
        return distances

    def deviation(self, w: Float[Tensor, "batch kept"], classes: Int[Tensor, " batch"]) -> Float[Tensor, "batch kept"]:
        """``S_k^(−1/2) (w − m_k)``, k from ``classes``."""
        return torch.einsum("bpq,bq->bp", self.whiteners[classes], w) + self.offsets[classes]


class UnitLengthVersion1(ClasswiseVersion1):
    """:class:`ClasswiseVersion1` of z / ‖z‖."""

    kind = "gda++"
    unit_length = True


class PooledVersion1(UnitLengthVersion1):
    """:class:`UnitLengthVersion1` of features averaged over positions."""

    kind = "pooled++"
    input_kind = "pooled"


class TiedVersion1(_Version1, TiedDensity):
    """One covariance shared by all classes."""


class RelativeVersion1(_Version1, RelativeDensity):
    """``tied`` minus the log-density of one Gaussian for all images."""


DENSITIES_OF_VERSION_1: Final[Mapping[str, type[Density]]] = {
    density.kind: density
    for density in (ClasswiseVersion1, TiedVersion1, UnitLengthVersion1, PooledVersion1, RelativeVersion1)
}
"""Densities of version-1 bundles by kind."""
