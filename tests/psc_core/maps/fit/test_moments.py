"""Moments of positions, against a twin that takes one vector at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.maps import POSITIONS, Grid, PositionMoments
from tests.reference import maps as naive


def features_of(seed: int, images: int, channels: int, positions: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 100 + torch.randn(images, channels, positions, generator=generator)


@given(
    st.integers(0, 99), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2), st.integers(1, 4)
)
def test_matches_the_twin(seed: int, images: int, channels: int, side: int, first: int, batch: int) -> None:
    grid = Grid(side, side, first)
    features, sums = features_of(seed, images, channels, grid.positions), PositionMoments(channels, grid)
    for part in torch.split(features, batch):
        sums.add(part)
    got = sums.finish()
    mean, covariance = naive.moments(list(features[:, :, first:].double().permute(0, 2, 1).flatten(0, 1).numpy()))
    assert got.vectors == images * side**2
    np.testing.assert_allclose(got.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(got.covariance, covariance, rtol=1e-9, atol=1e-9)


def test_large_maps_are_read_at_some_positions() -> None:
    sums = PositionMoments(1, Grid(32, 32))
    sums.add(torch.arange(1024.0).view(1, 1, -1))
    moments = sums.finish()
    assert moments.vectors == POSITIONS and abs(moments.mean.item() - 511.5) < 60
    assert moments.resolution == torch.finfo(torch.float32).eps
