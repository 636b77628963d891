"""Baseline detectors: pure scores against loops, the temperature, and the whole on a small network."""

from __future__ import annotations

import math
from collections import OrderedDict

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, special
from torch import nn

from psc_core.compute import Compute
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.errors import FitError, NetworkError, UsageError
from psc_core.evaluation import baselines
from psc_core.evaluation.baselines import (
    Baselines,
    fit_baselines,
    fit_temperature,
    full_density,
    knn_score,
    max_softmax_score,
)
from psc_core.heads.softmax import TEMPERATURES
from psc_core.images.preprocess import Preprocess
from tests.reference import metrics as naive

CPU = Compute(torch.device("cpu"), batch_images=32)
PREPROCESS = Preprocess("L", 6, 6, None, (0.5,), (0.25,))


def small_net() -> nn.Sequential:
    """One convolution, average pooling, one linear layer."""
    conv, pool = nn.Conv2d(1, 8, 3, padding=1), nn.AdaptiveAvgPool2d(2)
    layers = {"conv": conv, "relu": nn.ReLU(), "pool": pool, "flat": nn.Flatten(), "fc": nn.Linear(32, 3)}
    return nn.Sequential(OrderedDict(layers))


def images(count: int, seed: int, *, classes: int = 3, noise: bool = False) -> ImageDataset:
    """A bright row for class 0, column for 1, corner for 2; or uniform noise."""
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256 if noise else 60, (count, 6, 6), generator=generator)
    labels = torch.arange(count) % classes
    if not noise:
        pixels[labels == 0, 2] += 150
        pixels[labels == 1, :, 3] += 150
        pixels[labels == 2, :3, :3] += 150
    source = ArraySource(pixels.to(torch.uint8).numpy())
    return label_images("toy", ["row", "column", "corner"], source, labels, PREPROCESS)


def trained() -> nn.Sequential:
    """Trained for a moment, so that features separate the classes."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = small_net()
        data = next(images(150, 1).batches(150))
        x = PREPROCESS.standardise(data.images)
        optimiser = torch.optim.Adam(net.parameters(), 0.02)
        for _ in range(40):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x), data.labels).backward()
            optimiser.step()
    return net.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def fitted() -> Baselines:
    return fit_baselines(trained(), "pool", images(180, 1), images(60, 2), compute=CPU)


ROWS = st.lists(st.lists(st.floats(-60, 60), min_size=3, max_size=3), min_size=1, max_size=12)


@given(ROWS)
def test_max_softmax_equals_loop(rows: list[list[float]]) -> None:
    expected = (1 - special.softmax(rows, axis=1).max(1)).tolist()
    assert max_softmax_score(torch.tensor(rows, dtype=torch.float64)).tolist() == pytest.approx(expected, abs=1e-12)


def test_max_softmax_does_not_saturate() -> None:
    score = max_softmax_score(torch.tensor([[80.0, 0.0], [90.0, 0.0]], dtype=torch.float64))
    assert score.tolist() == pytest.approx([math.exp(-80), math.exp(-90)])


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 40), st.integers(0, 3))
def test_knn_equals_loop(bank: int, queries: int, neighbours: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = nn.functional.normalize(torch.randn(bank + queries, 3, generator=generator, dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(baselines, "BANK_CHUNK", 4)
        got = knn_score(rows[bank:], rows[:bank], neighbours)
    expected = [naive.knn_distance(row, rows[:bank].tolist(), neighbours) for row in rows[bank:].tolist()]
    assert got.tolist() == pytest.approx(expected, abs=1e-7)


def test_logit_scores_equal_the_network(fitted: Baselines) -> None:
    batch = next(images(9, 3).batches(9))
    logits = trained()(PREPROCESS.standardise(batch.images)).double()
    out = fitted.score(batch.images)
    assert list(out.scores) == ["max-softmax", "entropy", "energy", "temperature", "gda", "knn", "mahalanobis++"]
    assert all(each.shape == (9,) and each.dtype == torch.float64 for each in out.scores.values())
    rows = special.softmax(logits.detach().numpy(), axis=1).tolist()
    assert out.probabilities["original"].flatten().tolist() == pytest.approx([p for row in rows for p in row], abs=1e-6)
    assert out.scores["max-softmax"].tolist() == pytest.approx([1 - max(p) for p in rows], abs=1e-6)
    entropies = [-sum(p * math.log(p) for p in row if p > 0) for row in rows]
    assert out.scores["entropy"].tolist() == pytest.approx(entropies, abs=1e-5)
    assert torch.allclose(out.scores["energy"], -logits.logsumexp(1), atol=1e-5)


def test_mahalanobis_equals_dense_formula(fitted: Baselines) -> None:
    net, train = trained(), next(images(180, 1).batches(180))
    query = next(images(8, 4).batches(8)).images

    def unit_features(x: torch.Tensor) -> torch.Tensor:
        features = net.pool(net.relu(net.conv(PREPROCESS.standardise(x)))).flatten(2).mean(2)
        return nn.functional.normalize(features.double())

    known, asked = unit_features(train.images), unit_features(query)
    means = torch.stack([known[train.labels == c].mean(0) for c in range(3)])
    centred = known - means[train.labels]
    precision = torch.linalg.pinv(centred.T @ centred / (len(known) - 3))
    gap = asked[:, None] - means
    expected = torch.einsum("bki,ij,bkj->bk", gap, precision, gap).amin(1).sqrt()
    assert torch.allclose(fitted.score(query).scores["mahalanobis++"], expected, rtol=2e-2)


@pytest.mark.parametrize("kind", ["gda", "gda++", "tied", "mahalanobis++", "rmd"])
def test_full_density_keeps_the_rank_of_the_features(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(400, 5, generator=generator) @ torch.randn(5, 12, generator=generator)
    density = full_density(z, torch.arange(400) % 3, num_classes=3, kind=kind)
    assert density.record["components"] == 5
    assert bool(density(z).log_density.isfinite().all())


@pytest.mark.parametrize("kind", ["gda", "tied"])
def test_full_density_takes_no_component_of_rounding_alone(kind: str) -> None:
    """Of features near a hundred, rounding alone is as large as the second."""
    random = torch.Generator().manual_seed(0)
    z = 100 + torch.randn(400, 2, generator=random) * torch.tensor([10, 5e-4])
    density = full_density(z, torch.arange(400) % 2, num_classes=2, kind=kind)
    assert density.record["components"] == 1


def test_small_classes_have_few_neighbours(fitted: Baselines) -> None:
    few = fit_baselines(trained(), "pool", images(36, 1), images(30, 2), compute=CPU)
    assert (fitted.neighbours, few.neighbours) == (30, 6)
    # With more of them than a class has, images of a class are farther from the last than one between the classes.
    bank = nn.functional.normalize(torch.eye(3).repeat(12, 1) + 0.05 * torch.randn(36, 3))
    between = nn.functional.normalize(torch.ones(1, 3))
    for neighbours, is_found in ((few.neighbours, True), (18, False)):
        known = knn_score(bank, bank, neighbours)
        assert (known < knn_score(between, bank, neighbours)).all() == is_found


def test_bank_is_a_seeded_subset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baselines, "BANK_IMAGES", 60)
    net, train, val = trained(), images(120, 1), images(30, 2)
    first = fit_baselines(net, "pool", train, val, compute=CPU)
    again = fit_baselines(net, "pool", train, val, compute=CPU)
    other = fit_baselines(net, "pool", train, val, compute=CPU, seed=1)
    assert first.bank.shape == (60, 8)
    assert torch.equal(first.bank, again.bank) and not torch.equal(first.bank, other.bank)
    assert torch.allclose(first.bank.norm(dim=1), torch.ones(60))


def test_rare_classes_and_several_labels() -> None:
    net, val = trained(), images(30, 2)
    base = images(120, 1)
    several = label_images("several", base.classes, base.source, torch.stack([base.labels, base.labels], 1), PREPROCESS)
    assert fit_baselines(net, "pool", several, val, compute=CPU).bank.shape == (120, 8)
    rare = label_images("rare", base.classes, base.source, torch.tensor([2] + [i % 2 for i in range(119)]), PREPROCESS)
    fitted = fit_baselines(net, "pool", rare, val, compute=CPU)
    assert bool(fitted.score(next(val.batches(30)).images).scores["gda"].isfinite().all())
    with pytest.raises(FitError, match="at least two images"):
        fit_baselines(net, "pool", images(3, 1), val, compute=CPU)


def test_rejects_another_network() -> None:
    net = trained()
    with pytest.raises(NetworkError, match="no layer 'avgpool'"):
        fit_baselines(net, "avgpool", images(30, 1), images(30, 2), compute=CPU)
    net.fc = nn.Linear(32, 7)
    with pytest.raises(UsageError, match="got 7"):
        fit_baselines(net.eval(), "pool", images(30, 1), images(30, 2), compute=CPU)


@given(ROWS, st.integers(0, 2))
def test_temperature_minimises_the_nll(drawn: list[list[float]], label: int) -> None:
    labels = [(label + i) % 3 for i in range(len(drawn))]

    def loss(log_temperature: float) -> float:
        return naive.tempered_nll(drawn, labels, math.exp(log_temperature))

    logits = torch.tensor(drawn, dtype=torch.float64)
    found = fit_temperature(logits, torch.tensor(labels))
    assert TEMPERATURES[0] * 0.999 <= found <= TEMPERATURES[1] * 1.001
    best = optimize.minimize_scalar(loss, bounds=tuple(map(math.log, TEMPERATURES)), method="bounded")
    assert loss(math.log(found)) <= best.fun + 1e-6


def test_extreme_and_uninformative_logits() -> None:
    labels = torch.tensor([0, 1])
    never_wrong = fit_temperature(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), labels)
    assert TEMPERATURES[0] <= never_wrong < 0.2  # the loss is zero from there on
    assert fit_temperature(torch.tensor([[0.0, 5.0], [5.0, 0.0]]), labels) == pytest.approx(TEMPERATURES[1])
    assert fit_temperature(torch.zeros(2, 2), labels) == 1.0
