"""Bins of the numbers of a regression.

Collapse, projection, density and gates work on classes.  For a regression these are *bins*: the numbers between two
neighbouring quantiles of the training images, so that each bin has about as many of them.  (The analogy is ours.)
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Final

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.data.dataset import ImageDataset, known_values
from psc_core.errors import DataError

BINS: Final = 10
"""Maximum number of bins."""

IMAGES_PER_BIN: Final = 20
"""Training images that a bin should have; fewer images make fewer bins."""


def quantile_edges(values: Float[Tensor, " n"]) -> Float[Tensor, " edges"]:
    """Return the numbers that separate the bins, ascending: quantiles of ``values`` without repetition.

    Raises:
        DataError: If all values are equal.
    """
    bins = min(BINS, max(2, len(values) // IMAGES_PER_BIN))
    ascending = values.double().sort().values
    if ascending[0] == ascending[-1]:
        raise DataError(f"expected numbers that differ between images, all are {float(ascending[0]):g}; nothing to fit")
    at = torch.arange(1, bins) * len(values) // bins
    edges = ascending[at]
    edges = edges[torch.cat([edges[:1] > ascending[0], edges.diff() > 0])]
    return edges if len(edges) else ascending[ascending > ascending[0]][:1]  # More than half are the smallest.


def in_bins(dataset: ImageDataset, edges: Float[Tensor, " edges"]) -> ImageDataset:
    """Return ``dataset`` labelled with the bin of each number; one that equals an edge belongs to the bin above."""
    ends = ["", *(f"{edge:.4g}" for edge in edges.tolist()), ""]
    names = [_bin_name(low, high) for low, high in pairwise(ends)]
    if len(set(names)) < len(names):  # Numbers that four digits do not tell apart.
        names = [f"{name} (bin {index})" for index, name in enumerate(names)]
    labels = torch.bucketize(known_values(dataset.values), edges, right=True)
    return replace(dataset, labels=labels, classes=tuple(names))


def _bin_name(low: str, high: str) -> str:
    return f"{low} to {high}" if low and high else f"below {high}" if high else f"{low} and above"


def binned(train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
    """Return both, labelled with bins of the training images' numbers.

    Raises:
        DataError: If all numbers are equal.
    """
    edges = quantile_edges(known_values(train.values))
    return in_bins(train, edges), in_bins(val, edges)
