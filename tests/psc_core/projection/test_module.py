"""Algorithm 1 against loops; leading components, pooling, restoring."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import BundleError, FitError
from psc_core.projection import Projection, reshape_features
from tests.reference import projection as reference


def random_projection(channels: int, d: int, c_proj: int, d_proj: int, seed: int = 0) -> Projection:
    generator = torch.Generator().manual_seed(seed)
    dim = c_proj * d_proj
    return Projection.from_moments(
        [d],
        torch.randn(channels, d, generator=generator),
        torch.rand(channels, d, generator=generator) + 0.5,
        torch.randn(channels, c_proj, generator=generator),
        torch.randn(d, d_proj, generator=generator),
        torch.randn(dim, generator=generator),
        torch.rand(dim, generator=generator) + 0.5,
    )


@given(
    n=st.integers(1, 4),
    channels=st.integers(1, 4),
    d=st.integers(2, 5),
    c_proj=st.integers(1, 4),
    d_proj=st.integers(1, 4),
    seed=st.integers(0, 50),
)
def test_module_matches_the_loop(n: int, channels: int, d: int, c_proj: int, d_proj: int, seed: int) -> None:
    p = random_projection(channels, d, c_proj, d_proj, seed)
    x = torch.randn(n, channels, d, generator=torch.Generator().manual_seed(seed))
    expected = reference.project(
        x, p.mean, 1 / p.inverse_std, p.channel_factor, p.spatial_factor, p.z_mean, 1 / p.z_inverse_std
    )
    torch.testing.assert_close(p([x]).double(), expected, rtol=1e-4, atol=1e-4)


def test_leading_components_are_a_block() -> None:
    large = random_projection(5, 6, 4, 3)
    x = torch.randn(7, 5, 6)
    block = large([x]).view(7, 4, 3)
    torch.testing.assert_close(large.leading(2, 2)([x]).view(7, 2, 2), block[:, :2, :2])


def test_concatenates_layers() -> None:
    first, second = torch.randn(2, 3, 16), torch.randn(2, 3, 4)
    joined = reshape_features([first, second], [16, 4])
    assert torch.equal(joined, torch.cat([first, second], dim=2))
    with pytest.raises(FitError, match="equal numbers of channels"):
        reshape_features([first, torch.randn(2, 5, 4)], [16, 4])


def test_fully_connected_layer_is_one_channel() -> None:
    vector = torch.randn(2, 7, 1)
    assert torch.equal(reshape_features([vector], [7]), vector.transpose(1, 2))


def test_pools_by_block_means() -> None:
    maps = torch.randn(2, 3, 64)
    pooled = reshape_features([maps], [16])
    expected = maps.view(2, 3, 4, 2, 4, 2).mean((3, 5)).flatten(2)
    torch.testing.assert_close(pooled, expected)


def test_round_trip() -> None:
    projection = random_projection(4, 5, 2, 3)
    again = Projection.restore(projection.config(), projection.state_dict())
    x = torch.randn(3, 4, 5)
    assert torch.equal(again([x]), projection([x]))
    with pytest.raises(BundleError, match="with sizes"):
        Projection.restore({**projection.config(), "c_proj": 3}, projection.state_dict())
