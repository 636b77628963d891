"""What published tables rest on: networks of the published sizes, detectors and forecasts beside their definitions."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.device.timing import operations, traffic
from benchmarks.fitting import Penultimate
from benchmarks.networks import NETWORKS, AverageShortcut, SpectralBound
from benchmarks.ood import peers, tables
from benchmarks.ood.detectors import Images, fdbd, scored
from benchmarks.regression.networks import gaussian_nll
from benchmarks.regression.run import coverage_of_other_half, measured, normal
from benchmarks.serving import running
from benchmarks.serving.ceilings import images_per_s
from benchmarks.serving.curve import goal_rate, sweep
from benchmarks.serving.servers import BY_NAME, answer_of
from tests.app.fakes import png
from tests.opened import opened

PARAMETERS = {
    "resnet18": 11_173_962,
    "resnet18_narrow": 701_466,
    "resnet50": 23_520_842,
    "wide_resnet28_10": 36_479_194,
    "vgg16": 14_728_266,
    "vgg16_narrow": 924_186,
    # without the 1×1 convolutions of the shortcuts: 8,192 + 32,768 + 131,072 weights and 1,792 of batch normalisation
    "resnet18_mod": 11_173_962 - 173_824,
    "wide_resnet28_10_mod": 36_479_194 - 16 * 160 - 160 * 320 - 320 * 640,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_networks_have_the_published_sizes(name: str) -> None:
    with torch.device("meta"):
        net = NETWORKS[name](10, 3).eval()
        assert net(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(p.numel() for p in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("stride", "side"), [(1, 5), (2, 6), (2, 7)])
def test_shortcut_of_ddu_equals_loops(stride: int, side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    found = AverageShortcut(nn.Conv2d(3, 5, 1, stride))(x)
    small, window = -(-side // stride), stride if side % 2 == 0 else 1
    assert found.shape == (2, 5, small, small) and bool((found[:, 3:] == 0).all())
    for i in range(small):
        for j in range(small):
            pixels = x[:, :, i * stride : i * stride + window, j * stride : j * stride + window]
            torch.testing.assert_close(found[:, :3, i, j], pixels.mean((2, 3)))


def dense_norm(layer: nn.Module, input_shape: tuple[int, ...]) -> float:
    basis = torch.eye(int(torch.Size(input_shape).numel())).view(-1, *input_shape[1:])
    return float(torch.linalg.matrix_norm(layer(basis).flatten(1), 2))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [5, 6])
@torch.no_grad()
def test_spectral_norm_is_that_of_the_linear_map(stride: int, size: int) -> None:
    torch.manual_seed(0)
    layer, shape = nn.Conv2d(3, 4, 3, stride, 1, bias=False), (1, 3, size, size)
    free = dense_norm(layer, shape)
    bound = SpectralBound(layer, torch.Size(shape), 0.5 * free)
    bound._iterate(layer.weight, 300)
    assert torch.equal(SpectralBound(layer, torch.Size(shape), 10 * free)(layer.weight), layer.weight)
    layer.weight.copy_(bound(layer.weight))
    assert dense_norm(layer, shape) == pytest.approx(0.5 * free, rel=1e-3)


def features(count: int, classes: int, seed: int) -> Penultimate:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % classes
    values = torch.randn(count, 6, generator=generator) + 3 * torch.eye(6)[labels]
    return Penultimate(values.float(), values[:, :classes].double(), labels)


def test_fdbd_equals_loops() -> None:
    found = features(8, 3, 0)
    weight, mean = torch.randn(3, 6, generator=torch.Generator().manual_seed(1)), found.features.mean(0)
    scores = fdbd(found.features, found.logits, weight, mean)
    for i, (h, f) in enumerate(zip(found.features.double().numpy(), found.logits.numpy(), strict=True)):
        c = int(f.argmax())
        terms = [(f[c] - f[k]) / np.linalg.norm(weight[c] - weight[k]) for k in range(3) if k != c]
        assert scores[i].item() == pytest.approx(-np.mean(terms) / np.linalg.norm(h - mean.double().numpy()), rel=1e-5)


def test_every_peer_fits_and_scores() -> None:
    pytest.importorskip("pytorch_ood")
    train, inside = features(300, 3, 0), features(60, 3, 1)
    output = nn.Linear(6, 3)
    with torch.no_grad():
        output.weight.copy_(torch.eye(3, 6))
        output.bias.zero_()
    fitted, failed = peers.fit_peers(train, output, seed=0)
    assert failed == {} and len(fitted) == 17
    near, far = (Images(size * inside.features, size * inside.logits, inside.labels) for size in (1.0, 0.01))
    for detector in fitted:
        values = scored(detector, near)
        assert values.shape == (60,) and bool(values.isfinite().all()), detector.name
        if detector.name in ("MSP", "entropy", "MaxLogit", "energy", "GEN"):
            assert scored(detector, far).median() > values.median(), detector.name


def part(setting: str, seed: int, **auroc: float) -> dict[str, object]:
    detectors = {name: {"auroc": value, "fpr95": 1 - value} for name, value in auroc.items()}
    return {"setting": setting, "seed": seed, "families": dict.fromkeys(auroc, "psc"), "outside": {"other": detectors}}


def test_worst_gap_is_to_the_best_of_each_setting() -> None:
    parts = [part("cifar10", 0, PSC=0.8, KNN=0.9), part("cifar10", 1, PSC=0.9, KNN=0.92)]
    parts.append(part("dirty-mnist", 0, PSC=0.99, KNN=0.7))
    assert tables.worst_gaps(tables.means(parts)) == pytest.approx({"PSC": 0.06, "KNN": 0.29})


@pytest.mark.parametrize(("second", "expected"), [(0.90, "tie"), (0.84, "behind")])
def test_a_tie_is_a_paired_difference_within_its_standard_error(second: float, expected: str) -> None:
    parts = [part("cifar10", 0, PSC=0.80, KNN=0.84), part("cifar10", 1, PSC=second, KNN=0.88)]
    assert tables.default_table(parts).splitlines()[-1].split("|")[-2].strip() == expected


def test_forecasts_are_scored_as_torch_and_the_normal_distribution_do() -> None:
    outputs, y = torch.randn(2, 50, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = nn.GaussianNLLLoss()(outputs[:, 0], y[:, 0], outputs[:, 1].exp())
    torch.testing.assert_close(gaussian_nll(outputs, y[:, 0]), expected)
    digits = opened("rotated-mnist", "train")
    count, generator = 20_000, torch.Generator().manual_seed(0)
    many = replace(digits, values=torch.randn(count, generator=generator, dtype=torch.float64))
    narrow = torch.full((count,), 0.25, dtype=torch.float64)  # The deviation is wrong, the ranks are not.
    forecast = normal(torch.zeros(count, dtype=torch.float64), narrow, narrow)
    assert measured(forecast, many)["width"] == pytest.approx(0.25 * 2 * 1.95996, rel=1e-4)
    assert abs(coverage_of_other_half(forecast, many, seed=1) - 0.95) < 4 * (2 * 0.95 * 0.05 / (count / 2)) ** 0.5


def test_adapter_answers_like_the_library(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCH_BUNDLE", str(tiny_bundle))
    monkeypatch.setenv("BENCH_COUNTS", str(tmp_path))
    for module in ("benchmarks.serving.adapters.model", "benchmarks.serving.running"):
        monkeypatch.setattr(f"{module}.FACTORY", "tests.tiny:network")
    from benchmarks.serving.adapters.model import Model

    model, server, image = Model(), BY_NAME["mosec"], png(5, size=28)
    (answer,) = model.predict([model.decode(image)])
    running.check_answer(server, answer_of(server, model.dump(answer)), tiny_bundle, image)
    with pytest.raises(running.ServerFailed):
        running.check_answer(server, {**answer, "log_density": answer["log_density"] + 1}, tiny_bundle, image)


def test_rates_and_bounds_are_those_of_the_definitions() -> None:
    steps = {"folded": {"1": 2.0, "8": 9.0, "32": 30.0, "64": 64.0}}
    assert images_per_s(steps, 48) == pytest.approx(1000 * 48 / 47) and images_per_s(steps, 0.2) == 500

    def send(_name: str, rate: float) -> dict[str, object]:
        return {"per_s": rate, "end": "behind" if rate > 130 else None, "p50_ms": 1.0, "p99_ms": 100 * rate / 88}

    assert goal_rate(sweep(100.0, ["a"], send)["a"]) == 82.9
    net, x = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(5 * 30 * 30, 7)), torch.randn(2, 3, 32, 32)
    assert operations(net, x) == 2 * 2 * (5 * 30 * 30 * 27 + 5 * 30 * 30 * 7)
    a, b = torch.randn(4, 6), torch.randn(6, 8)
    assert traffic(lambda _: a @ b, x) == 4 * (24 + 48 + 32)
