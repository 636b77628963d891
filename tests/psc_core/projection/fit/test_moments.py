"""Channelwise moments in batches against a loop, at every scale."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core.errors import FitError
from psc_core.numerics.linalg import DEAD_UNIT
from psc_core.projection import channel_moments
from tests.reference import projection as reference


def stream(x: Tensor, size: int) -> Iterator[Tensor]:
    yield from x.split(size)


@given(
    n=st.integers(1, 12),
    channels=st.integers(1, 4),
    d=st.integers(1, 5),
    size=st.integers(1, 12),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
    shift=st.sampled_from([0.0, 1e4]),
    seed=st.integers(0, 99),
)
def test_streaming_matches_the_loop(
    n: int, channels: int, d: int, size: int, scale: float, shift: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(n, channels, d, generator=generator, dtype=torch.float64) + shift) * scale
    got = channel_moments(stream(x, size))
    mean, covariance = reference.moments(x)
    torch.testing.assert_close(got.mean, mean, rtol=1e-12, atol=1e-12 * scale)
    torch.testing.assert_close(got.covariance, covariance, rtol=1e-9, atol=1e-9 * scale**2)
    assert got.count == n


def test_correlation_clamps_dead_units() -> None:
    x = torch.randn(50, 3, 4, dtype=torch.float64)
    x[:, 1, 2] = 7.0
    moments = channel_moments(stream(x, 16))
    diagonal = moments.correlation().diagonal(dim1=1, dim2=2)
    alive = torch.ones(3, 4, dtype=torch.bool)
    alive[1, 2] = False
    torch.testing.assert_close(diagonal[alive], torch.ones(11, dtype=torch.float64))
    assert diagonal[1, 2] == 0
    raw = moments.covariance.diagonal(dim1=1, dim2=2)
    assert float(moments.std()[1, 2]) == pytest.approx(DEAD_UNIT * float(raw.mean().sqrt()))


def test_rejects_unusable_features() -> None:
    with pytest.raises(FitError, match="every unit"):
        channel_moments([torch.ones(4, 2, 2)]).std()
    with pytest.raises(FitError, match="at least one training image"):
        channel_moments([])
    with pytest.raises(FitError, match="finite"):
        channel_moments([torch.full((2, 1, 1), torch.nan)])


def rounded(rows: int, size: float, seed: int, *shape: int) -> Tensor:
    """Float32 values around ``size`` that differ between rows by at most four of their steps."""
    random = torch.Generator().manual_seed(seed)
    means = size * torch.randn(1, *shape, generator=random)
    steps = torch.randint(-4, 5, (rows, *shape), generator=random)
    return means + steps * torch.finfo(torch.float32).eps * means.abs()


@given(size=st.sampled_from([1e-6, 0.06, 1.0, 1e6]), seed=st.integers(0, 99))
def test_a_unit_that_differs_by_rounding_is_scaled_to_zero(size: float, seed: int) -> None:
    x = rounded(40, size, seed, 2, 3)
    with pytest.raises(FitError, match="constant"):
        channel_moments(stream(x, 16)).std()
    x[:, 0, 0] = size * 1e-3 * torch.randn(40, generator=torch.Generator().manual_seed(seed))
    moments = channel_moments(stream(x, 16))
    scaled = (x.double() - moments.mean) / moments.std()
    assert scaled[:, 0, 0].std(correction=0) == pytest.approx(1.0)
    assert scaled.abs().sum((0,))[moments.std() == float("inf")].sum() == 0
    others = scaled.std(0, correction=0).flatten()[1:]
    assert others.max() < 0.1, "rounding does not count as variation"
