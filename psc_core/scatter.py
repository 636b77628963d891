r"""Class means, scatter about them and distances to them, summed batch by batch in float64.

With h_i the feature vector of row i (one image with one label), μ_c the mean of class c over its n_c rows and
μ_G = (1/K) Σ_c μ_c,

    within  = Σ_c Σ_{i∈c} ‖h_i − μ_c‖²          between = Σ_c n_c ‖μ_c − μ_G‖²
    total   = Σ_i ‖h_i − μ_G‖² = within + between

The last equality is exact for the exact class means, whatever the class sizes, and adds squares only: nothing
cancels, unlike Σ‖h‖² − N‖μ‖², which loses every digit where collapse is strong.  NC1 = within / total is
Tr(Σ_W)/Tr(Σ_T) of the paper's section 4.1 with each row weighing the same.

An image with several labels is one feature vector and several rows: row m is image ``owner[m]``.  Features are
converted a block of columns at a time, so no float64 copy of a whole batch exists.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

_BLOCK = 1 << 17
"""Float64 entries converted at a time: 1 MiB stays in a core's cache (8 MiB took five times as long)."""

_ROUNDING = 1e-28
"""Scatter below this share of Σ n_c‖μ_c‖² is float64 rounding of a constant."""


def add_class_sums_(
    sums: Float[Tensor, "classes dim"],
    features: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " rows"],
    owner: Int[Tensor, " rows"],
) -> None:
    """Add each row's features to the sum of its class, in place (float64).

    One product of a (classes present × batch) count matrix with the features: an image with several labels
    is read once, and the result does not depend on the order of parallel additions.
    """
    present, inverse = torch.unique(labels, return_inverse=True)
    counts = torch.zeros(len(present), len(features), dtype=sums.dtype, device=labels.device)
    counts.index_put_((inverse, owner), counts.new_ones(()), accumulate=True)
    counts, present = counts.to(sums.device), present.to(sums.device)
    for columns in _columns(features.shape[1], len(features)):
        sums[:, columns].index_add_(0, present, counts @ features[:, columns].to(sums.dtype))


def within_scatter(
    features: Float[Tensor, "batch dim"],
    labels: Int[Tensor, " rows"],
    owner: Int[Tensor, " rows"],
    means: Float[Tensor, "classes dim"],
) -> Float[Tensor, ""]:
    """Σ over rows of ‖h − μ_label‖², float64."""
    owner, labels = owner.to(means.device), labels.to(means.device)
    total = torch.zeros((), dtype=means.dtype, device=means.device)
    for columns in _columns(features.shape[1], len(labels)):
        centred = features[:, columns].index_select(0, owner) - means[:, columns].index_select(0, labels)
        total += centred.square_().sum()
    return total


def between_scatter(
    means: Float[Tensor, "classes dim"], counts: Float[Tensor, " classes"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Σ_c n_c ‖μ_c − μ_G‖², and Σ_c n_c ‖μ_c‖², the scale below which scatter is rounding."""
    between, level = means.new_zeros(()), means.new_zeros(())
    for columns in _columns(means.shape[1], len(means)):
        block = means[:, columns]
        between += counts @ (block - block.mean(0)).square_().sum(1)
        level += counts @ block.square().sum(1)
    return between, level


def variability(within: float, between: float, level: float) -> float:
    """NC1 = within / (within + between); 0 for features that never vary, which have fully collapsed."""
    total = within + between
    return within / total if total > _ROUNDING * level else 0.0


def centroid_scores(
    features: Float[Tensor, "batch dim"], means: Float[Tensor, "classes dim"]
) -> Float[Tensor, "batch classes"]:
    """‖h − μ_c‖² − ‖h − μ_G‖², float64: smallest for the nearest class mean.

    Both are centred on μ_G first, x = h − μ_G and m_c = μ_c − μ_G; then ‖m_c‖² − 2 x·m_c has no large terms to
    cancel.  Scores of column ranges add up.
    """
    scores = torch.zeros(len(features), len(means), dtype=means.dtype, device=means.device)
    for columns in _columns(means.shape[1], max(len(features), len(means))):
        block = means[:, columns]
        centre = block.mean(0)
        block = block - centre
        scores.addmm_(features[:, columns] - centre, block.T, alpha=-2.0)
        scores += block.square().sum(1)
    return scores


def _columns(width: int, rows: int) -> Iterator[slice]:
    step = max(1, _BLOCK // max(1, rows))
    return (slice(start, min(width, start + step)) for start in range(0, width, step))
