"""The deep Vecchia ensemble beside its definition, and beside exact Gaussian processes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import features
from psc_core.errors import BundleError
from psc_core.fitted import restore
from psc_core.heads import dve
from psc_core.heads.dve import DeepVecchiaHead, GaussianProcess, condition, nearest_points, reduction, vecchia_nll
from psc_core.tasks.regression import Regression
from tests.psc_core.heads.classifiers import LargestTensor
from tests.psc_core.heads.regressions import fit_head
from tests.reference import heads as reference

SIGNAL, NOISE = 1.3, 0.05


def points(n: int, d: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    return x, (2 * x[:, 0]).sin() + 0.2 * torch.randn(n, generator=generator, dtype=torch.float64)


def drawn(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two layers, of 3 and 5 columns; the number bends with the first column, and the second layer knows nothing."""
    generator = torch.Generator().manual_seed(seed)
    z = 3 + 2 * torch.randn(n, 8, generator=generator)
    noise = 0.2 * torch.randn(n, generator=generator)
    return z, (50 + 10 * ((z[:, 0] - 3).sin() + 0.5 * (z[:, 1] - 3) + noise)).double()


@pytest.fixture(scope="module")
def head() -> DeepVecchiaHead:
    (z, y), (z_val, y_val) = drawn(400), drawn(150, 1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dve, "STEPS", 120)
        fitted = fit_head(z, y, z_val, y_val, kind="dve", widths=(3, 5), images=torch.arange(400).flip(0))
    assert isinstance(fitted, DeepVecchiaHead)
    return fitted


@given(st.integers(2, 25), st.integers(1, 4), st.integers(0, 1000))
def test_likelihood_given_all_earlier_ones_is_exact(n: int, d: int, seed: int) -> None:
    x, t = points(n, d, seed)
    length = torch.linspace(-0.5, 0.5, d, dtype=torch.float64)
    process = GaussianProcess(length, torch.tensor(SIGNAL).double().log(), torch.tensor(NOISE).double().log())
    got = n * float(vecchia_nll(x, t, torch.arange(n), n - 1, process))
    signal, noise = (float(part) for part in process.variances)
    assert got == pytest.approx(reference.exact_process_nll(x / length.exp(), t, signal, noise), abs=1e-6)


@given(st.integers(2, 25), st.integers(1, 4), st.integers(0, 1000))
def test_prediction_given_all_points_is_exact(n: int, d: int, seed: int) -> None:
    (x, t), (new, _) = points(n, d, seed), points(3, d, seed + 1)
    near = nearest_points(new.float(), x.float(), n)
    variances = torch.tensor(SIGNAL), torch.tensor(NOISE)
    mean, variance = condition(new, x[near.positions], t[near.positions], *variances)
    for i in range(3):
        expected = reference.process_given(new[i], x, t, *(float(part) for part in variances))
        assert (float(mean[i]), float(variance[i])) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("block", [7, 64, 1000])
def test_neighbours_are_the_nearest_whatever_the_block(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(dve, "BLOCK", block)
    (x, _), (new, _) = points(200, 3), points(9, 3, 1)
    found = nearest_points(new, x, 12)
    assert found.positions.tolist() == [reference.nearest(each, x, 12) for each in new]
    earlier = nearest_points(x[5:8], x, 12, before=torch.arange(5, 8))
    for row, i in enumerate(range(5, 8)):
        assert earlier.positions[row, :i].tolist() == reference.nearest(x[i], x[:i], 12)
        assert earlier.squared[row, i:].isinf().all()


def test_outputs_equal_their_definition_in_float64(head: DeepVecchiaHead) -> None:
    z, _ = drawn(6, 2)
    got, told = head(z), head.explain(z)
    t = {name: tensor.double() for name, tensor in head.state_dict().items()}
    signals, noises = t["signal"].tolist(), t["noise"].tolist()
    unit = float(t["value_scale"] * t["deviation_factor"])
    for i, phi in enumerate((z.double() - t["center"]) * t["inverse_scale"]):
        means, variances = [], []
        for layer in range(2):
            x, stored = phi @ t["basis"][layer], t["points"][layer]
            near = reference.nearest(x, stored, head.m)
            mean, variance = reference.process_given(x, stored[near], t["values"][near], signals[layer], noises[layer])
            means.append(mean)
            variances.append(variance + noises[layer])
            assert told["neighbour_image"][i, layer].tolist() == t["images"][near[:3]].tolist()
            assert float(told["neighbour_distance"][i, layer, 0]) == pytest.approx(
                float((x - stored[near[0]]).norm()), rel=1e-4
            )
        mean, variance, noise, beta = reference.product_of_experts(means, variances, signals, noises)
        assert float(got.mean[i]) == pytest.approx(float(t["value_center"] + t["value_scale"] * mean), rel=1e-4)
        assert float(got.aleatoric[i]) == pytest.approx(unit * math.sqrt(noise), rel=1e-4)
        assert float(got.epistemic[i]) == pytest.approx(unit * math.sqrt(variance - noise), rel=1e-3)
        assert told["layer_weight"][i].tolist() == pytest.approx(beta, rel=1e-3)


def test_finds_what_a_line_cannot(head: DeepVecchiaHead) -> None:
    z, y = drawn(300, 3)
    got = head(z)
    (z_train, y_train), (z_val, y_val) = drawn(400), drawn(150, 1)
    line = fit_head(z_train, y_train, z_val, y_val)
    error, of_line = ((out.mean - y).square().mean().sqrt() for out in (got, line(z)))
    assert float(error) < 0.8 * float(of_line)
    inside = (got.mean - y).abs() < 2 * torch.hypot(got.aleatoric, got.epistemic)
    assert 0.9 < float(inside.double().mean()) < 1.0


def test_explains_by_training_images(head: DeepVecchiaHead) -> None:
    z, y = drawn(400)
    told = head.explain(z[:4])
    assert {name: tuple(part.shape) for name, part in told.items()} == {
        "neighbour_image": (4, 2, 3), "neighbour_value": (4, 2, 3), "neighbour_distance": (4, 2, 3),
        "layer_weight": (4, 2),
    }  # fmt: skip
    # It was told that its images were in the reverse order.
    assert told["neighbour_image"][:, 0, 0].tolist() == [399, 398, 397, 396]
    torch.testing.assert_close(told["neighbour_value"][:, 0, 0].double(), y[:4], atol=1e-3, rtol=1e-5)
    torch.testing.assert_close(told["layer_weight"].sum(1), torch.ones(4))


def test_first_axis_is_the_regressions() -> None:
    z, y = drawn(300)
    phi, t = (z - z.mean(0)).double() / z.std(0), (y - y.mean()) / y.std()
    axes = reduction(phi, t, 3)
    assert axes.shape == (8, 3)
    torch.testing.assert_close(axes.T @ axes, torch.eye(3).double(), atol=1e-8, rtol=0)
    along = torch.corrcoef(torch.stack([phi @ axes[:, 0], t]))[0, 1]
    assert float(along) > 0.7


@given(st.integers(2, 12), st.integers(1, 4), st.integers(0, 50))
def test_any_size_gives_finite_outputs(n: int, d: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    z, y = torch.randn(n, d, generator=generator), torch.randn(n, generator=generator).double()
    z[2:] = z[0]  # Of equal images the noise alone is left.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dve, "STEPS", 2)
        head = fit_head(z, y, z[:2], y[:2], kind="dve")
    for images in (z, z + 1e4, z[:0]):
        got = head(images)
        assert all(part.shape == (len(images),) and bool(part.isfinite().all()) for part in got)
    assert float(head(z).aleatoric.min()) > 0


def test_blocks_and_batches_of_any_size_give_the_same(head: DeepVecchiaHead, monkeypatch: pytest.MonkeyPatch) -> None:
    z, _ = drawn(20, 4)
    whole = head(z)
    monkeypatch.setattr(dve, "BLOCK", 64)
    monkeypatch.setattr(dve, "IMAGES", 3)
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 12)
    for got, expected in zip(head(z), whole, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_a_graph_of_a_process_with_hardly_any_noise_is_as_exact(
    head: DeepVecchiaHead, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = dict(head.named_buffers()) | {
        "noise": torch.full((2,), dve.LEAST_NOISE),
        "signal": torch.full((2,), 50.0),
    }
    tensors["points"] = tensors["points"] / 20
    nearly_sure = DeepVecchiaHead(tensors, record={})
    z, _ = drawn(20, 4)
    expected = nearly_sure(z)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    deviation = torch.hypot(expected.aleatoric, expected.epistemic)
    assert float(((nearly_sure(z).mean - expected.mean) / deviation).abs().max()) < 1e-4


def test_memory_does_not_grow_with_the_stored_points() -> None:
    largest = {}
    for n in (20_000, 60_000):
        state = {"center": torch.zeros(4), "inverse_scale": torch.ones(4), "basis": torch.randn(1, 4, 4),
                 "points": torch.randn(1, n, 4), "values": torch.randn(n), "images": torch.arange(n).double(),
                 "signal": torch.ones(1), "noise": torch.ones(1), "neighbours": torch.tensor(8.0),
                 "value_center": torch.zeros(()), "value_scale": torch.ones(()),
                 "deviation_factor": torch.ones(())}  # fmt: skip
        big = DeepVecchiaHead(state, record={})
        with torch.inference_mode(), LargestTensor() as seen:
            big(torch.randn(dve.IMAGES + 3, 4))
        largest[n] = seen.elements
    assert largest[20_000] == largest[60_000] == dve.IMAGES * dve.BLOCK


def test_stores_no_more_images_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dve, "MAX_POINTS", 50)
    monkeypatch.setattr(dve, "STEPS", 1)
    (z, y), (z_val, y_val) = drawn(80), drawn(20, 1)
    head = fit_head(z, y, z_val, y_val, kind="dve", widths=(3, 5))
    assert head.sizes == {"dim": 8, "layers": 2, "reduced": 5, "points": 50}


@pytest.mark.parametrize(
    ("name", "value"), [("neighbours", 0.0), ("neighbours", 2.5), ("neighbours", 1e6), ("noise", -1)]
)
def test_refuses_what_cannot_be(head: DeepVecchiaHead, name: str, value: float) -> None:
    state = head.state_dict()
    state[name] = torch.full_like(state[name], value)
    with pytest.raises(BundleError, match=rf"dve\.{name}"):
        restore(Regression.heads, head.config(), state)
