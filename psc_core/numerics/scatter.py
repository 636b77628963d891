r"""Class means, scatter about them and distances to them, in one pass, summed batch by batch in float64.

With h_i the feature vector of row i (one image with one label), μ_c the mean of class c over its n_c rows and
μ_G = (1/K) Σ_c μ_c,

    within  = Σ_c Σ_{i∈c} ‖h_i − μ_c‖²          between = Σ_c n_c ‖μ_c − μ_G‖²
    total   = Σ_i ‖h_i − μ_G‖² = within + between

The last equality is exact for the exact class means, whatever the class sizes.  NC1 = within / total is
Tr(Σ_W)/Tr(Σ_T) of the paper's section 4.1 with each row weighing the same.

One pass is as good as two: a batch's rows are centred on the batch's own class means m_c, and the batch is merged
into what came before (Chan, Golub & LeVeque 1983),

    within ← within + Σ ‖h_i − m_c‖² + n_c b_c / (n_c + b_c) ‖m_c − μ_c‖²,     μ_c ← μ_c + b_c / (n_c + b_c) (m_c − μ_c)

with b_c rows of class c in the batch.  Only squares of differences are added: nothing cancels, unlike
Σ‖h‖² − N‖μ‖², which loses every digit where collapse is strong.  The cost of a batch is its own size times
the classes in it, so images are best read class by class (:func:`psc_core.data.dataset.by_class`).

An image with several labels is one feature vector and several rows, summed up as distinct (image, class) pairs
that weigh as many rows as they stand for.  Features are converted a block of columns at a time, so no float64 copy
of a whole batch exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

MIN_COLUMNS = 1024
"""Fewest columns worth a pass of their own, whatever the budget."""

_BLOCK = {"cpu": 1 << 17}
"""Float64 entries converted at a time: on a CPU 1 MiB, which stays in a core's cache."""

_BLOCK_ELSEWHERE = 1 << 23
"""The same on any other device: 64 MiB, few kernels."""

_ROUNDING = 1e-28
"""Scatter below this share of Σ n_c‖μ_c‖² is float64 rounding of a constant."""


class ClassPairs(NamedTuple):
    """The rows of a batch as distinct (image, class) pairs.

    Attributes:
        image_index: Image of each pair; ``None`` when pair m is image m.
        present: The classes in the batch, ascending.
        position: Where each pair's class is in ``present``.
        counts: ``float64``, rows of each class in ``present``.
        indicator: ``float64 (present, pairs)``, rows that a pair stands for, in its class's line.
        root_weights: Square root of the rows each pair stands for; ``None`` when all are one.
    """

    image_index: Int[Tensor, " pairs"] | None
    present: Int[Tensor, " present"]
    position: Int[Tensor, " pairs"]
    counts: Float[Tensor, " present"]
    indicator: Float[Tensor, "present pairs"]
    root_weights: Float[Tensor, " pairs"] | None


def class_pairs(
    labels: Int[Tensor, " rows"], image_index: Int[Tensor, " rows"], device: torch.device | str = "cpu"
) -> ClassPairs:
    """Pairs of the rows ``(image_index[m], labels[m])`` of one batch; ``image_index`` ascending; on the CPU."""
    alone = len(image_index) == 0 or (
        int(image_index[-1]) == len(image_index) - 1 and bool((image_index.diff() == 1).all())
    )
    weights = torch.ones(len(labels), dtype=torch.float64)
    if not alone:
        pairs, rows = torch.unique(torch.stack([image_index, labels]), dim=1, return_counts=True)
        image_index, labels, weights = pairs[0], pairs[1], rows.double()
    present, position = torch.unique(labels, return_inverse=True)
    indicator = torch.zeros(len(present), len(labels), dtype=torch.float64)
    indicator[position, torch.arange(len(labels))] = weights
    return ClassPairs(
        None if alone else image_index.to(device),
        present.to(device),
        position.to(device),
        indicator.sum(1).to(device),
        indicator.to(device),
        None if bool((weights == 1).all()) else weights.sqrt().to(device),
    )


class ClassScatter:
    """Class means and within-class scatter of the rows seen so far.

    Attributes:
        counts: ``float64 (classes,)`` rows of each class.
        means: ``float64 (classes, dim)``.
        within: Σ over rows of ‖h − μ_label‖²: ``float64 ()``, or ``(dim,)`` one entry a column.
    """

    def __init__(self, classes: int, dim: int, device: torch.device | str = "cpu", *, by_column: bool = False) -> None:
        self.counts = torch.zeros(classes, dtype=torch.float64, device=device)
        self.means = torch.zeros(classes, dim, dtype=torch.float64, device=device)
        self.within = torch.zeros((dim,) if by_column else (), dtype=torch.float64, device=device)

    def add(self, features: Float[Tensor, "images dim"], rows: ClassPairs) -> None:
        """Merge one batch of at least one image; no float64 copy of it is made."""
        pairs, by_column = rows.indicator.shape[1], self.within.ndim == 1
        batch_means = self.means.new_empty(len(rows.present), features.shape[1])
        scatter = torch.zeros_like(self.within)
        buffer: Tensor | None = None
        for columns in _columns(features.shape[1], pairs, features.device):
            block = features[:, columns]
            if rows.image_index is not None:
                block = block.index_select(0, rows.image_index)
            if buffer is None or buffer.shape != block.shape:
                buffer = torch.empty(block.shape, dtype=torch.float64, device=block.device)
            x = buffer.copy_(block)
            means = (rows.indicator @ x).div_(rows.counts[:, None])
            batch_means[:, columns] = means
            x -= means if len(means) == 1 else means.index_select(0, rows.position)
            if rows.root_weights is not None:
                x *= rows.root_weights[:, None]
            part = scatter[columns] if by_column else scatter
            part += _sum_of_squares(x, by_column=by_column)
        self.within += scatter
        self._merge(batch_means, rows)

    def _merge(self, batch_means: Float[Tensor, "present dim"], rows: ClassPairs) -> None:
        """Merge the batch's class means, its own scatter being added already."""
        self.counts.index_add_(0, rows.present, rows.counts)
        share = (rows.counts / self.counts.index_select(0, rows.present))[:, None]
        gaps = batch_means.sub_(self.means.index_select(0, rows.present))
        self.means.index_add_(0, rows.present, gaps * share)
        gaps *= (rows.counts[:, None] * (1 - share)).sqrt_()
        self.within += _sum_of_squares(gaps, by_column=self.within.ndim == 1)

    def all_reduce(self, sum_: Callable[[Tensor], Tensor]) -> None:
        """Merge the rows of all processes, exactly as if they had been in one."""
        counts = sum_(self.counts.clone())
        scale = counts.clamp_min(1)[:, None]
        means = sum_(self.means * (self.counts[:, None] / scale))
        gaps = self.means.sub_(means).square_()
        self.within = sum_(self.within + (self.counts @ gaps if self.within.ndim else self.counts @ gaps.sum(1)))
        self.counts, self.means = counts, means

    def total(self) -> Float[Tensor, " dim"]:
        """Scatter of each column about the mean of the class means μ_G, weighted by row (needs ``by_column``)."""
        centre = self.means[self.counts > 0].mean(0)
        return self.within + self.counts @ (self.means - centre).square_()

    def mean_and_std(self) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
        """Of each column over all rows (needs ``by_column``); a constant one gets the standard deviation 1."""
        rows = self.counts.sum()
        mean = (self.counts @ self.means) / rows
        std = ((self.within + self.counts @ (self.means - mean).square_()) / rows).sqrt()
        floor = 1e-6 * std.square().mean().sqrt()
        return mean, torch.where(std > floor, std, 1.0)


def between_scatter(
    means: Float[Tensor, "classes dim"], counts: Float[Tensor, " classes"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Σ_c n_c ‖μ_c − μ_G‖², and Σ_c n_c ‖μ_c‖², the scale below which scatter is rounding."""
    between, level = means.new_zeros(()), means.new_zeros(())
    for columns in _columns(means.shape[1], len(means), means.device):
        block = means[:, columns]
        between += counts @ (block - block.mean(0)).square_().sum(1)
        level += counts @ block.square().sum(1)
    return between, level


def nc1_from_scatter(within: float, between: float, level: float) -> float:
    """NC1 = within / (within + between); 0 for features that never vary, which have fully collapsed."""
    total = within + between
    return within / total if total > _ROUNDING * level else 0.0


class Centroids:
    """Distances to class means: ‖h − μ_c‖² − ‖h − μ_G‖², float64, smallest for the nearest class mean.

    Both are centred on μ_G first, x = h − μ_G and m_c = μ_c − μ_G; then ‖m_c‖² − 2 x·m_c has no large terms to
    cancel.  Scores of column ranges add up.

    Args:
        means: ``float64 (classes, dim)``; taken over and changed in place.
    """

    def __init__(self, means: Float[Tensor, "classes dim"]) -> None:
        self.centre = means.mean(0)
        self.directions = means.sub_(self.centre)
        self.offsets = means.new_zeros(len(means))
        for columns in _columns(means.shape[1], len(means), means.device):
            self.offsets += means[:, columns].square().sum(1)

    def scores(self, features: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch classes"]:
        """Scores of a batch."""
        scores = self.offsets.repeat(len(features), 1)
        for columns in _columns(features.shape[1], max(1, len(features)), features.device):
            scores.addmm_(features[:, columns] - self.centre[columns], self.directions[:, columns].T, alpha=-2.0)
        return scores


def _sum_of_squares(x: Tensor, *, by_column: bool) -> Tensor:
    """Of all entries, or of each column; ``x`` may be overwritten."""
    return x.square_().sum(0) if by_column else torch.dot(x.flatten(), x.flatten())


def _columns(width: int, rows: int, device: torch.device) -> Iterator[slice]:
    step = max(1, _BLOCK.get(device.type, _BLOCK_ELSEWHERE) // max(1, rows))
    return (slice(start, min(width, start + step)) for start in range(0, width, step))
