"""The rule that selects the candidate layer(s) from the collapse measured after every layer.

Paper, section 4.1: of the layers whose features still vary within classes, NC1 > ε, take the one with the highest NC4,
where the nearest class mean is right most often; of equals take the deepest.  If NC1 of this layer or of the next one
is within :data:`NEAR` of ε and both have the same number of channels, take both: the layers before and after collapse.
The logits are measured but never selected.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from psc_core.errors import UsageError
from psc_core.network.layers import LayerInfo

EPSILON: Final = 0.2
"""Neural collapse cutoff ε on NC1, as in the paper."""

NEAR: Final = 0.05
"""Maximum distance of NC1 from ε at which two layers are combined."""


@dataclass(frozen=True)
class LayerCollapse(LayerInfo):
    """A layer and the neural collapse measured after it.

    Attributes:
        nc1: Tr(Σ_W)/Tr(Σ_T) on the training data: 1 without class structure, 0 for complete collapse.
        nc4: Fraction of the labelled validation examples whose nearest class mean is that of their label.
    """

    nc1: float
    nc4: float


@dataclass(frozen=True)
class Candidate:
    """The layer(s) a PSC reads.

    Attributes:
        layers: One or two layer names, in execution order.
        reason: Why these layers, in one sentence with the numbers.
    """

    layers: tuple[str, ...]
    reason: str


def choose_candidate(layers: Sequence[LayerCollapse], *, epsilon: float, pattern: str | None = None) -> Candidate:
    """Select the candidate by the rule of this module, among the layers whose name matches ``pattern``.

    Raises:
        UsageError: No layer before the output matches the pattern.
    """
    matcher = re.compile(pattern or "")
    eligible = [entry for entry in layers if entry.role != "output" and matcher.search(entry.name)]
    if not eligible:
        raise UsageError(f"no layer before the output matches {pattern!r}; widen the pattern")
    passing = [entry for entry in eligible if entry.nc1 > epsilon]
    if not passing:
        highest = max(eligible, key=lambda entry: (entry.nc1, entry.nc4, entry.index))
        return Candidate(
            (highest.name,),
            f"no layer has NC1 > {epsilon:g}, all have collapsed; the least collapsed one is "
            f"{describe(highest)}: expect OOD detection no better than at the penultimate layer",
        )
    best = max(passing, key=lambda entry: (entry.nc4, entry.index))
    reason = f"{describe(best)}, has the highest NC4 of the {len(passing)} layers with NC1 > {epsilon:g}"
    following = next((entry for entry in eligible if entry.index > best.index), None)
    if (
        following is None
        or following.shape[0] != best.shape[0]
        or all(abs(entry.nc1 - epsilon) > NEAR + 1e-12 for entry in (best, following))
    ):
        return Candidate((best.name,), reason)
    return Candidate(
        (best.name, following.name),
        f"{reason}; the next layer, {describe(following)}, joins it: NC1 is within {NEAR:g} of {epsilon:g} "
        f"and both have {best.shape[0]} channels",
    )


def describe(entry: LayerCollapse) -> str:
    """Name and numbers of a layer, for messages."""
    return f"{entry.name} (NC1 {entry.nc1:.4f}, NC4 {entry.nc4:.4f})"
