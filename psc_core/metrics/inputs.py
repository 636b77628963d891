"""Check the inputs of metrics, and group equal scores.

No metric depends on the order of its input.  Thresholds only lie between distinct values (AUPR, FPR95, coverage at
risk); ranks are averaged (AUROC); AURC, AUGRC and adaptive ECE give each member of a group of equal confidence the
group's mean error, which is the expectation under random order.

Empty inputs, inputs of different lengths and NaN raise :class:`~psc_core.errors.UsageError`; infinite scores are
ordered like any others.
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from psc_core.errors import UsageError

GUESSING_DEVIATIONS: Final = 1.645
"""Standard deviations above chance that a measure of agreement exceeds for one in twenty random guesses."""


def check_values(name: str, *vectors: Tensor) -> None:
    """Raise :class:`UsageError`, which names the metric, if a vector is empty or has NaN."""
    lengths = [len(vector) for vector in vectors]
    if min(lengths) == 0:
        raise UsageError(f"{name}: expected at least one value in each input, got lengths {lengths}")
    if any(bool(vector.isnan().any()) for vector in vectors):
        raise UsageError(f"{name}: expected numbers, got NaN; look for images whose scores are not finite")


def check_same_length(name: str, first: Tensor, second: Tensor) -> None:
    """Call :func:`check_values` for two vectors, and check that they have the same length."""
    check_values(name, first, second)
    if len(first) != len(second):
        raise UsageError(f"{name}: expected inputs of one length, got {len(first)} and {len(second)}")


def by_confidence(confidence: Float[Tensor, " n"], values: Shaped[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``values`` from most to least confident, averaged within groups of equal confidence, float64."""
    order = confidence.argsort(descending=True)
    size = tie_sizes(confidence[order])
    group = torch.arange(len(size), device=values.device).repeat_interleave(size)
    total = torch.zeros(len(size), dtype=torch.float64, device=values.device)
    total.index_add_(0, group, values[order].double())
    means: Tensor = (total / size)[group]
    return means


def tie_sizes(ordered: Float[Tensor, " n"]) -> Int[Tensor, " groups"]:
    """Return the lengths of the runs of equal values."""
    starts = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]]).nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([len(ordered)])]).diff()
