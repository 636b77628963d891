"""The Gaussian of a position and its grey levels, against twins."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import FitError
from psc_core.maps import (
    DECADES,
    DISTANCE_ROUNDING,
    LEVELS,
    MAX_COMPONENTS,
    LayerMoments,
    fit_positions,
    thresholds,
    with_levels,
)
from psc_core.numerics.linalg import DEAD_UNIT, EIGENVALUE_FLOOR, TAIL_FRACTION
from tests.reference import maps as naive


def moments_of(vectors: torch.Tensor) -> LayerMoments:
    mean, covariance = naive.moments(list(vectors.double().numpy()))
    return LayerMoments(
        len(vectors), torch.from_numpy(mean), torch.from_numpy(covariance), torch.finfo(torch.float32).eps
    )


@given(st.integers(0, 99), st.integers(1, 7), st.integers(0, 2))
def test_distances_match_the_twin(seed: int, channels: int, dead: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    mixed = torch.randn(channels, channels, generator=generator)
    vectors = torch.randn(50, channels, generator=generator) @ mixed
    vectors[:, : min(dead, channels - 1)] = 0  # Units that no image excites.
    moments = moments_of(vectors)
    got = fit_positions(moments)(vectors.T[None])[0]
    limits = {"dead": DEAD_UNIT, "floor": EIGENVALUE_FLOOR, "most": MAX_COMPONENTS}
    mean, covariance = moments.mean.numpy(), moments.covariance.numpy()
    expected = [naive.distance(vector, mean, covariance, **limits) for vector in vectors.double().numpy()]
    np.testing.assert_allclose(got, expected, rtol=5e-3, atol=1e-3)


def test_rounding_is_no_component() -> None:
    vectors = torch.randn(500, 2, dtype=torch.float64)
    vectors = torch.cat([vectors, vectors.sum(1, keepdim=True)], dim=1)
    fitted = fit_positions(moments_of(vectors))
    assert fitted.record["resolved"] == 2 and fitted.sizes["kept"] == 2


@pytest.mark.parametrize("value", [0.0, 3.0, torch.inf])
def test_constant_or_infinite_features_are_refused(value: float) -> None:
    covariance = torch.zeros(2, 2, dtype=torch.float64)
    with pytest.raises(FitError, match="for a map"):
        fit_positions(LayerMoments(9, torch.full((2,), value, dtype=torch.float64), covariance, 1e-7))


READINGS = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=60)


@given(READINGS)
def test_thresholds_match_the_twin(readings: list[float]) -> None:
    got = thresholds(torch.tensor(readings))
    exact = naive.thresholds(readings, LEVELS, DECADES, TAIL_FRACTION)
    expected = [(1 + DISTANCE_ROUNDING) * each for each in exact]
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-6)
    assert (got.diff() >= -1e-9 * got[-1]).all()


def test_equal_distances_have_one_level() -> None:
    plain = fit_positions(moments_of(torch.randn(100, 4)))
    fitted = with_levels(plain, torch.cat([torch.full((500,), 0.7), torch.linspace(1, 9, 500)]))
    near = 0.7 * (1 + torch.tensor([-1e-6, 0.0, 1e-6]))
    assert fitted.grey(near).tolist() == [0, 0, 0]


def test_levels_are_as_rare_as_they_say() -> None:
    generator = torch.Generator().manual_seed(0)
    plain = fit_positions(moments_of(torch.randn(4000, 4, generator=generator)))
    seen, other = torch.randn(2, 4, 200_000, generator=generator)
    fitted = with_levels(plain, plain(seen[None])[0])
    fresh = fitted.grey(fitted(other[None])[0])
    for level, fraction in ((64, 0.1), (128, 0.01), (191, 10**-2.996)):
        assert float((fresh >= level).float().mean()) == pytest.approx(fraction, rel=0.2)
    assert fitted.record["readings"] == 200_000
