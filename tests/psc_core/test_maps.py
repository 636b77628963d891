from __future__ import annotations

import base64
import io
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from PIL import Image

from psc_core import maps
from psc_core.errors import BundleError, FitError
from psc_core.images.decode import png_of
from psc_core.linalg import DEAD_UNIT, EIGENVALUE_FLOOR, TAIL_FRACTION
from psc_core.maps import (
    BOX,
    DECADES,
    DISTANCE_ROUNDING,
    LEVELS,
    MAX_COMPONENTS,
    MAX_POSITIONS,
    MIN_SIDE,
    POSITIONS,
    Grid,
    LayerMap,
    LayerMoments,
    PositionDensity,
    PositionMoments,
    box_of,
    fit_nearest,
    fit_positions,
    grid_of,
    map_document,
    thresholds,
    with_levels,
)
from tests.reference import maps as naive


@pytest.mark.parametrize(
    ("positions", "height", "width", "expected"),
    [
        (49, 224, 224, Grid(7, 7)), (197, 224, 224, Grid(14, 14, 1)), (201, 224, 224, Grid(14, 14, 5)),
        (14 * 20, 224, 320, Grid(14, 20)), (15 * 10, 480, 320, Grid(15, 10)), (4 * 6, 28, 40, Grid(4, 6)),
        (1, 224, 224, None), (9, 224, 224, None), (12 * 14, 224, 224, None), (128 * 128, 1024, 1024, None),
    ],
)  # fmt: skip
def test_known_layers(positions: int, height: int, width: int, expected: Grid | None) -> None:
    assert grid_of(positions, height, width) == expected


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 300))
def test_a_grid_covers_its_positions(positions: int, height: int, width: int) -> None:
    grid = grid_of(positions, height, width)
    if grid is not None:
        assert grid.positions == positions and grid.rows * grid.columns <= MAX_POSITIONS
        assert min(grid.rows, grid.columns) >= MIN_SIDE


@given(st.integers(8, 40), st.integers(8, 40), st.integers(1, 4))
def test_strided_layers_keep_the_sides(rows: int, columns: int, stride: int) -> None:
    height, width = rows * stride, columns * stride
    grid = grid_of(rows * columns, height, width)
    assert grid is not None and grid.first == 0
    assert abs(grid.rows * width - grid.columns * height) <= min(height, width)


GREYS = st_numpy.arrays(np.uint8, st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=8))


@given(GREYS)
def test_a_box_matches_the_twin(grey: np.ndarray) -> None:
    assert box_of(grey) == pytest.approx(naive.box(grey, BOX))


@given(GREYS)
def test_a_png_holds_the_levels(grey: np.ndarray) -> None:
    with Image.open(io.BytesIO(png_of(grey))) as picture:
        assert picture.mode == "L" and np.array_equal(np.asarray(picture), grey)


def test_a_black_map_is_boxed_as_a_whole() -> None:
    document = map_document("early", np.zeros((4, 6), np.uint8))
    assert (document["layer"], document["peak"], document["box"]) == ("early", 0, (0.0, 0.0, 1.0, 1.0))
    assert base64.b64decode(document["png"]).startswith(b"\x89PNG")


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
    monkeypatch.setattr(maps, "SERVE_ELEMENTS", 80)
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


def features_of(seed: int, images: int, channels: int, positions: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 100 + torch.randn(images, channels, positions, generator=generator)


@given(
    st.integers(0, 99), st.integers(1, 6), st.integers(1, 4), st.integers(1, 5), st.integers(0, 2), st.integers(1, 4)
)
def test_matches_the_twin_of_moments(seed: int, images: int, channels: int, side: int, first: int, batch: int) -> None:
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


@given(st.integers(0, 99), st.integers(1, 7))
def test_the_nearest_stored_vector_matches_the_twin(seed: int, channels: int) -> None:
    vectors = 100 + torch.randn(60, channels, generator=torch.Generator().manual_seed(seed))
    fitted, images = fit_nearest(vectors[:50]), vectors.T[None].repeat(2, 1, 1)
    stored = fitted.stored.tolist()
    assert stored == [vectors[row].tolist() for row in naive.farthest(vectors[:50].tolist(), 5)] or channels > 1
    expected = [min(math.dist(vector, each) for each in stored) for vector in vectors.tolist()]
    for distances in fitted(images):
        np.testing.assert_allclose(distances, expected, rtol=1e-4, atol=1e-3)
    levels = with_levels(fitted, torch.linspace(0, 9, 500).square())
    assert levels.grey(torch.tensor([1e-6, 1e-3])).tolist() == [0, 0]  # Rounding is not unusual.


DISTANCES = st.lists(st.floats(0, 1e6, width=32), min_size=1, max_size=60)


@given(DISTANCES)
def test_thresholds_match_the_twin(values: list[float]) -> None:
    got = thresholds(torch.tensor(values))
    exact = naive.thresholds(values, LEVELS, DECADES, TAIL_FRACTION)
    expected = (1 + DISTANCE_ROUNDING) * exact
    np.testing.assert_allclose(got, expected, rtol=1e-9, atol=1e-6)
    assert (got.diff() >= -1e-9 * got[-1]).all()


def test_equal_distances_have_one_level() -> None:
    plain = fit_positions(moments_of(torch.randn(100, 4)))
    fitted = with_levels(plain, torch.cat([torch.full((500,), 0.7), torch.linspace(1, 9, 500)]))
    near = 0.7 * (1 + torch.tensor([-1e-6, 0.0, 1e-6]))
    assert fitted.grey(near).tolist() == [0, 0, 0]
