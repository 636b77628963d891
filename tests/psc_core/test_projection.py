from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from psc_core import FitSettings, features, fit_projection
from psc_core import projection as module
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError, FitError
from psc_core.features import KeptFeatures
from psc_core.fit import collapse, project
from psc_core.fit_data import FitJob
from psc_core.linalg import DEAD_UNIT, ClassScatter, class_pairs
from psc_core.projection import (
    ITERATIONS,
    Projection,
    channel_moments,
    choose_ranks,
    nc1_prefixes,
    nearest_mean_hits,
    reduced_positions,
    reshape_features,
    tucker_factors,
)
from tests import tiny
from tests.opened import opened
from tests.psc_core.test_collapse import measured
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
    n=st.integers(1, 4), channels=st.integers(1, 4), d=st.integers(2, 5), c_proj=st.integers(1, 4),
    d_proj=st.integers(1, 4), seed=st.integers(0, 50),
)  # fmt: skip
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


CHOSEN = ChosenLayer(("2",), "16 channels, 7 × 7 positions")
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.network().eval()


@pytest.fixture(scope="module")
def train() -> ImageDataset:
    return opened("mnist", "train").subset(torch.arange(200))


@pytest.mark.parametrize(("components", "limit"), [(64, 10), (8, 1)])
def test_error_names_the_d_proj_that_would_do(
    net: torch.nn.Module, train: ImageDataset, monkeypatch: pytest.MonkeyPatch, components: int, limit: int
) -> None:
    """d components span d (d + 1) / 2 channel components; as many as fit are measured unless more are given."""
    monkeypatch.setattr(module, "MAX_COMPONENTS", components)
    with pytest.raises(FitError, match=rf"c_proj in 1…{limit} .* got 16; give d_proj too, at least 6"):
        fit_projection(net, CHOSEN, train, c_proj=16, settings=SETTINGS)
    fitted = fit_projection(net, CHOSEN, train, c_proj=16, d_proj=6, settings=SETTINGS)
    assert (fitted.report.c_proj, fitted.report.d_proj) == (16, 6)
    for sizes, allowed in (({"c_proj": 17, "d_proj": 6}, "c_proj in 1…16"), ({"d_proj": 50}, "d_proj in 1…49")):
        with pytest.raises(FitError, match=allowed):
            fit_projection(net, CHOSEN, train, settings=SETTINGS, **sizes)


def test_rejects_more_components_than_channels_vary_in(net: torch.nn.Module, train: ImageDataset) -> None:
    """The correlations of two positions have one number that differs, beside the ones on their diagonal."""
    pooled = torch.nn.Sequential(
        *[*net.children()][:3], torch.nn.AdaptiveAvgPool2d((1, 2)), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    )
    chosen = ChosenLayer(("3",), "16 channels, 1 × 2 positions")
    with pytest.raises(FitError, match="c_proj in 1…2"):
        fit_projection(pooled, chosen, train, c_proj=3, d_proj=2, settings=SETTINGS)


@given(st.integers(1, 2048), st.integers(1, 224), st.integers(1 << 14, 1 << 30), st.booleans())
def test_reduced_size_is_the_largest_that_fits(channels: int, side: int, budget: int, square: bool) -> None:
    assume(square or math.isqrt(side) ** 2 != side)
    sides = [side >> k for k in range(side.bit_length())]
    sizes = [length**2 for length in sides] if square else sides
    fitting = [size for size in sizes if channels * size**2 * 8 <= budget]
    assert reduced_positions(channels, sizes[0], budget) == max(fitting, default=1)


def test_correlation_clamps_dead_units() -> None:
    x = torch.randn(50, 3, 4, dtype=torch.float64)
    x[:, 1, 2] = 7.0
    moments = channel_moments(x.split(16))
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
        channel_moments(x.split(16)).std()
    x[:, 0, 0] = size * 1e-3 * torch.randn(40, generator=torch.Generator().manual_seed(seed))
    moments = channel_moments(x.split(16))
    scaled = (x.double() - moments.mean) / moments.std()
    assert scaled[:, 0, 0].std(correction=0) == pytest.approx(1.0)
    assert scaled.abs().sum((0,))[moments.std() == float("inf")].sum() == 0
    others = scaled.std(0, correction=0).flatten()[1:]
    assert others.max() < 0.1, "rounding does not count as variation"


def correlation_of(channels: int, d: int, rank_c: int, rank_d: int, seed: int) -> torch.Tensor:
    """Symmetric slices that span rank_c channel and rank_d spatial directions."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(channels, rank_c, generator=generator, dtype=torch.float64)
    basis = torch.randn(rank_c, d, rank_d, generator=generator, dtype=torch.float64)
    shared = torch.linalg.qr(torch.randn(d, rank_d, generator=generator, dtype=torch.float64))[0]
    core = torch.einsum("rdk,rek->rde", basis, basis)
    return torch.einsum("cr,rde->cde", weights, shared @ (shared.T @ core @ shared) @ shared.T)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 50))
def test_factors_are_orthonormal_and_repeatable(channels: int, d: int, seed: int) -> None:
    tensor = correlation_of(channels, d, min(3, channels), d, seed)
    a, b = tucker_factors(tensor, channels, d)
    torch.testing.assert_close(a.T @ a, torch.eye(a.shape[1], dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(b.T @ b, torch.eye(b.shape[1], dtype=torch.float64), atol=1e-8, rtol=0)
    again = tucker_factors(tensor.clone(), channels, d)
    assert torch.equal(a, again[0])
    assert torch.equal(b, again[1])


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 50))
def test_factors_match_the_naive_iteration(channels: int, d: int, seed: int) -> None:
    """The same subspaces where the tensor has them, under noise of a thousandth."""
    rank = min(2, channels)
    tensor = correlation_of(channels, d, rank, 2, seed)
    noise = torch.randn(channels, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tensor += 1e-3 * tensor.abs().max() * (noise + noise.transpose(1, 2))
    a, b = tucker_factors(tensor, rank, 2)
    captured, expected = (
        torch.einsum("cde,cp,dq,er->pqr", tensor, *factors, factors[1]).square().sum()
        for factors in ((a, b), reference.tucker(tensor, rank, 2, ITERATIONS))
    )
    torch.testing.assert_close(captured, expected, rtol=1e-5, atol=0)


def test_one_channel_is_an_eigendecomposition() -> None:
    x = torch.randn(200, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    matrix = torch.corrcoef(x.T)
    a, b = tucker_factors(matrix[None], 5, 3)
    values, vectors = torch.linalg.eigh(matrix)
    assert a.shape == (1, 1)
    leading = vectors[:, values.argsort(descending=True)[:3]]
    torch.testing.assert_close((b.T @ leading).abs(), torch.eye(3, dtype=torch.float64), atol=1e-8, rtol=0)


def test_no_column_is_rounding() -> None:
    """Of four positions the slices of a correlation span seven dimensions, whatever the number of channels."""
    x = torch.randn(500, 64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += torch.randn(500, 64, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    tensor = torch.einsum("ncd,nce->cde", x, x) / len(x)
    a, b = tucker_factors(tensor, 32, 4)
    assert (a.shape, b.shape) == ((64, 7), (4, 4))
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    other = torch.einsum("ncd,nce->cde", x[order], x[order]) / len(x)  # Equal up to rounding.
    for mine, theirs in zip((a, b), tucker_factors(other, 32, 4), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)


def settings(**changes: Any) -> FitSettings:
    return FitSettings(**{"minimum_dim": 1, **changes})


def sample(n: int, classes: int, c: int, d: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(0, classes, (n,), generator=generator)])
    means = torch.randn(classes, c, d, generator=generator, dtype=torch.float64)
    z = means[labels] + torch.randn(len(labels), c, d, generator=generator, dtype=torch.float64) + 100.0
    return z * scale, labels


@given(
    n=st.integers(2, 30), classes=st.integers(2, 4), c=st.integers(1, 4), d=st.integers(1, 4),
    size=st.integers(1, 20), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e6]),
)  # fmt: skip
def test_prefix_sums_match_the_sweep(n: int, classes: int, c: int, d: int, size: int, seed: int, scale: float) -> None:
    z, labels = sample(n, classes, c, d, seed, scale)
    scatter = ClassScatter(classes, c * d, by_column=True)
    for part, own in zip(z.flatten(1).split(size), labels.split(size), strict=True):
        scatter.add(part, class_pairs(own, torch.arange(len(own))))
    nc1 = nc1_prefixes(scatter.within.view(c, d), scatter.total().view(c, d))
    means = scatter.means.view(classes, c, d)
    hits = nearest_mean_hits(z, means, labels)
    for i in range(1, c + 1):
        for j in range(1, d + 1):
            assert float(nc1[i - 1, j - 1]) == pytest.approx(reference.nc1(z[:, :i, :j], labels), rel=1e-8)
            expected = reference.nc4(z[:, :i, :j], labels, means[:, :i, :j])
            assert int(hits[i - 1, j - 1]) / len(z) == pytest.approx(expected)


GRID = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9])


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_choice_matches_search(c: int, d: int, data: st.DataObject) -> None:
    nc1, nc4 = (
        torch.tensor(data.draw(st.lists(GRID, min_size=c * d, max_size=c * d)), dtype=torch.float64).view(c, d)
        for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.projection.NC4_LOSS", 0.1)
        patch.setattr("psc_core.projection.MUCH_NC4", 0.25)
        choice = choose_ranks(nc1, nc4, 0.7, settings(epsilon=0.3))
    assert choice[:2] == reference.smallest_size(nc1, nc4, 0.3, 0.7, 0.1, 0.25)


def test_column_ranges_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Class means beyond the budget are taken a range of columns at a time, in passes of their own."""
    net = tiny.network().eval()
    train, val = (opened("mnist", split) for split in ("train", "val"))
    chosen = measured(net, train, val, SETTINGS.changed({"layers": "^4$"})).choose("4")
    whole = fit_projection(net, chosen, train, val, minimum_dim=8, settings=SETTINGS).report
    monkeypatch.setattr(module, "MIN_COLUMNS", 100)
    monkeypatch.setattr(module, "reduced_positions", lambda channels, positions, budget: positions)
    few = SETTINGS.changed({"max_memory": 8 * 10 * 100})
    parts = fit_projection(net, chosen, train, val, minimum_dim=8, settings=few).report
    assert parts.scaled_nc1 == pytest.approx(whole.scaled_nc1, rel=1e-9)
    assert parts.scaled_nc4 == whole.scaled_nc4
    assert torch.equal(parts.nc1, whole.nc1) and torch.equal(parts.nc4, whole.nc4)


def test_kept_features_spare_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network runs once over the training images where their features need little memory, else twice."""
    net = tiny.network().eval()
    train, val = (opened("mnist", split) for split in ("train", "val"))
    chosen = measured(net, train, val, SETTINGS.changed({"layers": "^4$"})).choose("4")
    seen: list[int] = []
    original = module.feature_step

    def counted(*arguments: Any) -> Any:
        step = original(*arguments)
        return lambda images: (seen.append(len(images)), step(images))[1]

    monkeypatch.setattr(module, "feature_step", counted)
    once = fit_projection(net, chosen, train, val, minimum_dim=8, settings=SETTINGS)
    assert sum(seen) == len(train) + len(val) // 2
    seen.clear()
    job = FitJob.of(train, val, SETTINGS.changed({"minimum_dim": 8}))
    kept = KeptFeatures(len(train), SETTINGS.max_memory, torch.device("cpu"))
    collapse(net, job, kept)
    never = project(net, chosen, job, kept)
    assert sum(seen) == len(val) // 2
    seen.clear()
    monkeypatch.setattr(features, "KEPT", 1 << 30)
    twice = fit_projection(net, chosen, train, val, minimum_dim=8, settings=SETTINGS)
    assert sum(seen) == 2 * len(train) + len(val) // 2
    for other in (never, twice):
        torch.testing.assert_close(once.report.nc1, other.report.nc1, rtol=1e-6, atol=1e-9)
        assert torch.equal(once.report.nc4, other.report.nc4)


def test_features_are_kept_from_the_last_layer_on_as_far_as_there_is_room() -> None:
    images, (first, last) = 10, torch.arange(10 * 2 * 3.0 * 2).view(2, 10, 2, 3)
    shapes = {"first": (2, 3), "large": (2, 300), "last": (2, 3)}
    kept = KeptFeatures(images, features.KEPT * 4 * images * 12, torch.device("cpu"))
    kept.make_room(shapes)
    order = torch.randperm(images, generator=torch.Generator().manual_seed(0))
    for at in order.split(3):
        assert kept.of(["first", "last"]).get(at) is None  # not yet of all images
        kept.of([*shapes]).add(at, [first[at], torch.zeros(len(at), 2, 300), last[at]])
    assert torch.equal(torch.stack(kept.of(["last", "first"]).get(order) or []), torch.stack([last, first])[:, order])
    assert kept.of(["large", "last"]).get(order) is None
    kept.make_room({"first": (2, 3)})
    assert kept.of(["last"]).get(order) is None and kept.of(["first"]).get(order) is not None


def test_choice_at_its_edges() -> None:
    at_cutoff, both = torch.tensor([[0.25, 0.3]]).double(), torch.tensor([[0.9, 0.9]])
    assert choose_ranks(at_cutoff, both, 0.9, settings(epsilon=0.25))[1] == 2
    flat = torch.full((3, 4), 0.9)
    assert choose_ranks(flat, flat, 0.9, settings(epsilon=0.2, minimum_dim=64))[:2] == (3, 4)
    assert choose_ranks(flat, flat, 0.9, settings(epsilon=0.2, c_proj=2, d_proj=3, minimum_dim=100))[:2] == (2, 3)
    assert choose_ranks(flat, flat, 0.9, settings(epsilon=0.2, c_proj=3))[0] == 3
    nc1, nc4 = torch.tensor([[0.5, 0.1], [0.5, 0.1]]), torch.tensor([[0.4, 0.89], [0.5, 0.9]])
    named = choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2, d_proj=1))
    assert named[:2] == (2, 1) and "--c-proj 1 --d-proj 2" in named[2], "the sizes that keep more"
