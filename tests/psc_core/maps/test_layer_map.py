"""Distances and grey levels of a layer, against twins that take one position at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import maps as layer_map
from psc_core.errors import BundleError
from psc_core.maps import LEVELS, Grid, LayerMap, PositionDensity
from tests.reference import maps as naive


def density(channels: int, kept: int, seed: int = 0) -> PositionDensity:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "mean": torch.randn(channels, generator=generator),
        "whitener": torch.randn(channels, kept, generator=generator),
        "thresholds": torch.linspace(0.5, 20, LEVELS),
    }
    return PositionDensity(tensors, record={})


@given(
    st.integers(0, 3), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(0, 99)
)
def test_matches_the_twin(images: int, channels: int, rows: int, columns: int, first: int, seed: int) -> None:
    of = LayerMap("early", Grid(rows, columns, first), density(channels, max(1, channels // 2), seed))
    features = torch.randn(images, channels, first + rows * columns, generator=torch.Generator().manual_seed(seed))
    got = of.distances(features)
    mean, whitener = of.density.mean.double().numpy(), of.density.whitener.double().numpy()
    for image, distances in zip(features.double().numpy(), got.numpy(), strict=True):
        alone = [((vector - mean) @ whitener) for vector in image.T[first:]]
        squares = np.array([float(w @ w) for w in alone]).reshape(rows, columns)
        np.testing.assert_allclose(distances, naive.averaged(squares), rtol=1e-4, atol=1e-5)
    grey = of(features)
    assert grey.dtype == torch.uint8 and grey.shape == (images, rows, columns)
    thresholds = of.density.thresholds.tolist()
    expected = [sum(level <= each for level in thresholds) for each in got.flatten().tolist()]
    assert grey.flatten().tolist() == expected


def test_large_batches_are_split(monkeypatch: pytest.MonkeyPatch) -> None:
    of, features = density(4, 2), torch.randn(7, 4, 9)
    whole = of(features)
    monkeypatch.setattr(layer_map, "SERVE_ELEMENTS", 80)
    torch.testing.assert_close(of(features), whole)


def test_half_precision_features_are_widened() -> None:
    features = torch.randn(2, 4, 16).bfloat16()
    of = LayerMap("early", Grid(4, 4), density(4, 2))
    torch.testing.assert_close(of.distances(features), of.distances(features.float()))


def test_thresholds_are_checked() -> None:
    few = density(2, 1).state_dict() | {"thresholds": torch.arange(3.0)}
    falling = density(2, 1).state_dict() | {"thresholds": -torch.arange(float(LEVELS))}
    for tensors in (few, falling):
        with pytest.raises(BundleError, match="255 ascending thresholds"):
            LayerMap("early", Grid(4, 4), PositionDensity(tensors, record={}))


def test_features_of_another_layer_are_refused() -> None:
    of = LayerMap("early", Grid(4, 4, 1), density(3, 2))
    of.check(torch.zeros(1, 3, 17))
    for shape in ((1, 3, 16), (1, 4, 17)):
        with pytest.raises(BundleError, match="from early for the map"):
            of.check(torch.zeros(shape))
