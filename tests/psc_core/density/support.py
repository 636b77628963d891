"""Features for the tests of densities."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from torch import Tensor

from psc_core.density import DENSITIES

KINDS = sorted(DENSITIES)
SCALES = st.sampled_from([1e-6, 1.0, 1e6])
SEEDS = st.integers(0, 2**16)


def images(
    n: int, dim: int, classes: int, *, seed: int = 0, scale: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Features and labels: classes with means and covariances of their own, each with as many images."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    means = 2 * torch.randn(classes, dim, generator=random)
    spreads = 0.3 + torch.rand(classes, dim, generator=random)
    mixing = torch.randn(dim, dim, generator=random) / math.sqrt(dim)
    z = (means[labels] + spreads[labels] * torch.randn(n, dim, generator=random)) @ mixing
    return scale * (z + offset), labels
