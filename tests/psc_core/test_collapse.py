from __future__ import annotations

import csv
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge
from torch import Tensor, nn
from torch.nn import functional

from psc_core import collapse
from psc_core.collapse import (
    PENALTIES,
    CollapseReport,
    LayerCollapse,
    LinearFit,
    add_products,
    count_sketch,
    fit_ridge,
    measure_layers,
    paired_error,
    to_csv,
    to_text,
)
from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.data.open import open_dataset
from psc_core.errors import FitError, UsageError
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.linalg import r_squared
from psc_core.network.layers import canonical, list_layers
from psc_core.settings import FitSettings
from psc_core.tasks import task_of_images
from psc_core.tasks.regression import binned
from tests.reference import collapse as reference


def measured(
    net: nn.Module, train: ImageDataset, val: ImageDataset, settings: FitSettings, processes: tuple[int, int] = (0, 1)
) -> CollapseReport:
    """Return what ``psc-fit`` finds on these images, none of them set apart."""
    quality = task_of_images(train).layer_quality
    return measure_layers(net, train, val, settings, settings.compute(processes), quality)


PLAIN = Preprocess("L", 6, 6, None, (0.0,), (1.0,))


def on_cpu(batch_images: int = 64, **others: Any) -> FitSettings:
    return FitSettings(device="cpu", batch_images=batch_images, **others)


def images(seed: int, count: int, labels: Tensor | None = None, classes: int = 3) -> ImageDataset:
    """Noise with a class-dependent corner."""
    random = np.random.default_rng(seed)
    labels = torch.arange(count) % classes if labels is None else labels
    pixels = random.integers(0, 200, (count, 6, 6), dtype=np.uint8)
    first = labels if labels.ndim == 1 else labels[:, 0]
    pixels[:, :2, :2] += (25 * first.numpy()[:, None, None]).astype(np.uint8)
    return labelled("noise", [str(c) for c in range(classes)], ArraySource(pixels), labels, PLAIN)


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(1, 4, 3)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.hidden = nn.Linear(16, 5)
        self.out = nn.Linear(5, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.conv(x)))
        return self.out(torch.relu_(self.hidden(x.flatten(1))))


@torch.inference_mode()
def examples_of(net: nn.Module, name: str, data: ImageDataset) -> tuple[npt.NDArray[np.float64], list[int]]:
    """Features of every labelled example after one layer, and labels, by a hook on the whole network."""
    caught: list[Tensor] = []
    input_of = name.endswith(":input")
    module = net.get_submodule(name.removesuffix(":input"))
    handle = module.register_forward_hook(lambda _m, args, out: caught.append((args[0] if input_of else out).clone()))
    labels: list[int] = []
    features = []
    for index in range(len(data)):
        net(PLAIN.standardise(torch.tensor(data.image(index))[None]))
        own = data.labels[data.offsets[index] : data.offsets[index + 1]].tolist()
        labels += own
        features += [caught[-1].double().flatten().numpy()] * len(own)
    handle.remove()
    return np.stack(features), labels


@pytest.mark.parametrize("several", [False, True])
def test_every_layer_equals_naive_loop(several: bool) -> None:
    net = Net().eval()
    labels = torch.randint(0, 3, (40, 4), generator=torch.Generator().manual_seed(0)) if several else None
    train, val = images(0, 40, labels), images(1, 21)
    report = measured(net, train, val, on_cpu(16))
    assert [layer.name for layer in report.layers] == ["conv", "pool", "hidden", "out:input", "out"]
    assert (report.train_examples, report.val_examples) == (160 if several else 40, 21)
    for layer in report.layers:
        features, labels = examples_of(net, layer.name, train)
        val_features, val_labels = examples_of(net, layer.name, val)
        assert layer.nc1 == pytest.approx(reference.nc1(features, labels, 3), rel=1e-6)
        assert layer.quality == reference.nc4(features, labels, val_features, val_labels, 3)


@pytest.mark.parametrize("several", [False, True])
def test_errors_equal_naive_loop(several: bool) -> None:
    net = Net().eval()
    val_labels = torch.randint(0, 3, (33, 4), generator=torch.Generator().manual_seed(1)) if several else None
    train, val = images(0, 40), images(1, 33, val_labels)
    report = measured(net, train, val, on_cpu(16))
    hits = {}
    for layer in report.layers:
        features, labels = examples_of(net, layer.name, train)
        hits[layer.name] = reference.hits(features, labels, *examples_of(net, layer.name, val), 3)
    assert report.best is not None
    owners = np.repeat(np.arange(33), 4 if several else 1).tolist()
    expected = [reference.paired_error(hits[layer.name], hits[report.best.name], owners) for layer in report.layers]
    assert max(expected) > 0
    assert [layer.quality_error for layer in report.layers] == pytest.approx(expected, rel=1e-12)


def test_each_validation_label_counts() -> None:
    net = Net().eval()
    val = images(1, 20, torch.stack([torch.arange(20) % 3, (torch.arange(20) + 1) % 3], dim=1))
    report = measured(net, images(0, 40), val, on_cpu(7))
    features, labels = examples_of(net, "pool", images(0, 40))
    val_features, val_labels = examples_of(net, "pool", val)
    assert report.layer("pool").quality == reference.nc4(features, labels, val_features, val_labels, 3) <= 0.5


class Flat(nn.Module):
    """The linear toy: features are a linear map of the pixels."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.feature = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        self.feature.weight = nn.Parameter(weight)
        self.out = nn.Linear(weight.shape[0], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.feature(x.flatten(1)))


def test_linear_toy_equals_closed_form() -> None:
    """Pixels x = a·(2y − 1) ± s on independent axes; for h = W x

    Tr Σ_W = Σ_d s_d² ‖w_d‖²,   Tr Σ_T = Tr Σ_W + ‖W a‖²,   NC4 = 1 while every s keeps its side.
    """
    a, s = np.array([20.0, 10.0, 0.0]), np.array([4.0, 0.0, 8.0])
    signs = np.array([(y, i, j, k) for y in (-1, 1) for i in (-1, 1) for j in (-1, 1) for k in (-1, 1)])
    pixels = (100 + signs[:, :1] * a + signs[:, 1:] * s).astype(np.uint8).reshape(-1, 1, 3)
    labels = torch.from_numpy((signs[:, 0] + 1) // 2)
    preprocess = Preprocess("L", 1, 3, None, (0.0,), (1.0,))
    data = labelled("toy", ["minus", "plus"], ArraySource(pixels), labels, preprocess)
    weight = torch.tensor([[1.0, 2.0, 0.5], [0.0, -1.0, 3.0]])
    report = measured(Flat(weight), data, data, on_cpu())
    w = weight.double().numpy()
    within = float((s**2 * (w**2).sum(axis=0)).sum())
    between = float(((w @ a) ** 2).sum())
    assert report.layer("feature").nc1 == pytest.approx(within / (within + between), rel=1e-6)
    assert report.layer("feature").quality == 1.0
    assert report.penultimate == "feature"


@pytest.mark.parametrize("budget", [1, 900, 2500, 5000])
def test_groups_and_column_ranges_change_nothing(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "MIN_COLUMNS", 7)
    net, train, val = Net(), images(0, 40), images(1, 21, torch.randint(0, 3, (21, 2)))
    layers, whole = list_layers(net, torch.zeros(1, 1, 6, 6)), measured(net, train, val, on_cpu(8))
    parts = measured(net, train, val, on_cpu(8, max_memory=budget))
    assert sum(len(ranges) for _, ranges in collapse.layer_groups(layers, 3, 8, budget)) > 1
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert other.nc1 == pytest.approx(one.nc1, rel=1e-6)
        assert (other.quality, other.quality_error) == (one.quality, one.quality_error)


def test_wide_layer_runs_in_column_ranges() -> None:
    """200 classes × 20,000 columns against a budget of 8 MiB, a quarter of the class means."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Conv2d(1, 1250, 3)
            self.head = nn.Linear(1250, 200)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.wide(x).mean((2, 3)))

    torch.manual_seed(0)
    train, val = images(0, 400, classes=200, labels=torch.arange(400) % 200), images(1, 50, classes=200)
    few = measured(Wide(), train, val, on_cpu(50, max_memory=8 << 20, layers="wide"))
    torch.manual_seed(0)
    whole = measured(Wide(), train, val, on_cpu(50, layers="wide"))
    assert few.layer("wide").nc1 == pytest.approx(whole.layer("wide").nc1, rel=1e-9)
    assert few.layer("wide").quality == whole.layer("wide").quality


def test_pattern_always_includes_penultimate_layer() -> None:
    report = measured(Net(), images(0, 40), images(1, 21), on_cpu(layers="conv|hidden"))
    assert [layer.name for layer in report.layers] == ["conv", "hidden", "out:input"]
    assert report.choose().layers[0] in ("conv", "hidden")


def test_non_finite_features_name_layer() -> None:
    net = Net()
    with torch.no_grad():
        net.hidden.bias[0] = torch.inf
    with pytest.raises(FitError, match="finite features, layer hidden gives"):
        measured(net, images(0, 40), images(1, 21), on_cpu())


@pytest.mark.parametrize("epsilon", [0.0, 1.0, -1.0])
def test_rejects_epsilon_outside_unit_interval(epsilon: float) -> None:
    with pytest.raises(UsageError, match="between 0 and 1"):
        measured(Net(), images(0, 40), images(1, 21), on_cpu(epsilon=epsilon))


def test_in_place_activation_does_not_reach_its_layer() -> None:
    """The in-place activation behind a layer does not reach its measurement."""
    net = Net().eval()
    features, labels = examples_of(net, "conv", images(0, 40))
    assert features.min() < 0
    report = measured(net, images(0, 40), images(1, 21), on_cpu())
    assert report.layer("conv").nc1 == pytest.approx(reference.nc1(features, labels, 3), rel=1e-6)
    assert canonical(torch.zeros(1, 4, 4, 4), report.layer("conv").form).shape[1:] == report.layer("conv").shape


class Stale(nn.Module):
    """A layer that hardly varies, as stale statistics leave it, but whose last bits know the classes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.stale, self.last = nn.Linear(36, 8), nn.Linear(36, 64), nn.Linear(64, 3)
        with torch.no_grad():
            self.stale.weight.mul_(1e-6)
            self.stale.bias.fill_(1.0)

    def forward(self, x: Tensor) -> Tensor:
        unused = 0 * self.first(x.flatten(1)).sum(1, keepdim=True)
        return self.last(self.stale(x.flatten(1))) + unused


def test_a_layer_that_differs_by_rounding_is_not_chosen() -> None:
    report = measured(Stale(), images(0, 90), images(1, 60), on_cpu())
    stale = report.layer("stale")
    assert stale.quality >= report.layer("first").quality, "its rounding tells the classes apart"
    assert stale.nc1 == 0 and report.choose().layers == ("first",)


def report(*numbers: tuple[str, int, float, float], pattern: str | None = None, output: bool = True) -> CollapseReport:
    """Layers of (name, channels, NC1, NC4); the last two are penultimate and output."""
    roles = ["hidden"] * (len(numbers) - 2) + ["penultimate", "output"]
    if not output:
        roles = ["hidden"] * (len(numbers) - 1) + ["penultimate"]
    layers = tuple(
        LayerCollapse(name, index, "map", (channels, 4), (2, 2), role, nc1, nc4)
        for index, ((name, channels, nc1, nc4), role) in enumerate(zip(numbers, roles, strict=True))
    )
    return CollapseReport(layers, 0.2, "operations", pattern, 100, 50)


def test_caller_can_name_layer() -> None:
    table = report(("a", 4, 0.9, 0.5), ("bb", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    chosen = table.choose("p")
    assert chosen.layers == ("p",) and "named by the caller" in chosen.reason
    assert table.nc4_of(chosen) == 0.99
    with pytest.raises(UsageError, match="measured layers, got 'b'; did you mean bb"):
        table.choose("b")


def test_json_round_trip() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    assert CollapseReport.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert {"quality", "quality_error"} <= {*measured.to_json()["layers"][0]}, "the names of docs/bundle-format.md"


def test_takes_highest_nc4_above_cutoff() -> None:
    chosen = report(
        ("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("c", 8, 0.4, 0.7), ("p", 8, 0.1, 0.99), ("o", 2, 0.9, 1.0)
    ).choose()
    assert chosen.layers == ("b",)
    assert "b (NC1 0.6000, NC4 0.8000), has the highest NC4 of the 3 layers with NC1 > 0.2" in chosen.reason


def test_takes_deepest_of_equals() -> None:
    assert report(
        ("a", 4, 0.9, 0.8), ("b", 4, 0.6, 0.8), ("c", 4, 0.5, 0.7), ("p", 8, 0.1, 0.9), ("o", 2, 0.1, 0.9)
    ).choose().layers == ("b",)


def test_nc1_at_cutoff_does_not_pass() -> None:
    assert report(("a", 4, 0.5, 0.3), ("p", 8, 0.2, 0.9), ("o", 2, 0.1, 0.9)).choose().layers == ("a",)


@pytest.mark.parametrize(
    ("chosen_nc1", "next_nc1", "next_channels", "layers"),
    [
        (0.25, 0.01, 4, ("b", "c")),  # the chosen one is near
        (0.60, 0.15, 4, ("b", "c")),  # the next one is near
        (0.60, 0.14, 4, ("b",)),
        (0.26, 0.14, 4, ("b",)),
        (0.21, 0.19, 8, ("b",)),  # other channel counts cannot be concatenated
        (0.21, 0.22, 4, ("b",)),  # the next one has not collapsed
    ],
)
def test_two_layers_near_the_cutoff(
    chosen_nc1: float, next_nc1: float, next_channels: int, layers: tuple[str, ...]
) -> None:
    chosen = report(
        ("a", 4, 0.9, 0.5),
        ("b", 4, chosen_nc1, 0.9),
        ("c", next_channels, next_nc1, 0.85),
        ("p", 8, 0.1, 0.9),
        ("o", 2, 0.1, 0.9),
    ).choose()
    assert chosen.layers == layers
    assert ("joins it" in chosen.reason) == (len(layers) == 2)


def with_errors(measured: CollapseReport, *errors: float) -> CollapseReport:
    pairs = zip(measured.layers, errors, strict=True)
    return replace(measured, layers=tuple(replace(layer, quality_error=error) for layer, error in pairs))


def test_takes_deepest_within_one_error() -> None:
    measured = report(
        ("a", 4, 0.9, 0.90), ("b", 4, 0.6, 0.89), ("c", 4, 0.5, 0.88), ("d", 4, 0.4, 0.85), ("p", 8, 0.1, 0.99)
    )
    chosen = with_errors(measured, 0.0, 0.02, 0.021, 0.03, 0.0).choose()
    assert chosen.layers == ("c",)
    assert "within one standard error (0.0210) of the highest, 0.9000 after a" in chosen.reason
    assert with_errors(measured, 0.0, 0.02, 0.019, 0.049, 0.0).choose().layers == ("b",)
    assert measured.choose().layers == ("a",)


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 3), min_size=1, max_size=8))
def test_rule_equals_twin(numbers: list[tuple[float, float, float]]) -> None:
    layers = [(f"layer{i}", i + 1, nc1, nc4) for i, (nc1, nc4, _) in enumerate(numbers)]
    measured = with_errors(report(*layers, output=False), *(error for _, _, error in numbers))
    nc1s, nc4s, errors = zip(*numbers, strict=True)
    assume(max(nc1s) > measured.epsilon)
    assert measured.best is not None
    best = measured.best.index  # whose own error is 0, as it is measured
    errors = tuple(0.0 if i == best else error for i, error in enumerate(errors))
    chosen = with_errors(measured, *errors).choose()
    assert chosen.layers == (f"layer{reference.choose(nc1s, nc4s, errors, measured.epsilon)}",)


def test_takes_the_trunk_where_nothing_has_collapsed() -> None:
    layers = (("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("t", 4, 0.4, 0.6), ("p", 8, 0.3, 0.7), ("o", 2, 0.1, 0.9))
    plain = report(*layers)
    assert plain.choose().layers == ("b",)
    trunk = replace(plain, layers=tuple(replace(e, role="trunk") if e.name == "t" else e for e in plain.layers))
    assert trunk.choose().layers == ("t",)
    assert "nothing has collapsed, NC1 > 0.2 after every layer" in trunk.choose().reason
    assert trunk.choose("a").layers == ("a",) and replace(trunk, pattern="[ab]").choose().layers == ("b",)
    assert replace(trunk, measure=LinearFit).choose().layers == ("b",)  # Shown for classes alone.
    assert replace(trunk, epsilon=0.35).choose().layers == ("b",)  # "p" has collapsed.


def test_notes_say_that_candidate_is_early() -> None:
    deeper = [(f"l{i}", 4, 0.1, 0.9) for i in range(6)]
    measured = report(("a", 4, 0.9, 0.5), ("b", 8, 0.6, 0.4), *deeper)
    (note,) = measured.choose().notes
    assert "among the first 1 of 7" in note and "--layer l4" in note
    assert measured.choose("a").notes == (note,)
    assert measured.choose("b").notes == () == measured.choose("l4").notes


def test_never_takes_output() -> None:
    assert report(("a", 4, 0.5, 0.3), ("p", 2, 0.21, 0.9), ("o", 2, 0.2, 1.0)).choose().layers == ("p",)


def test_takes_least_collapsed_when_none_passes() -> None:
    chosen = report(("a", 4, 0.19, 0.3), ("p", 8, 0.1, 0.9), ("o", 2, 0.9, 0.9)).choose()
    assert chosen.layers == ("a",)
    assert "no layer has NC1 > 0.2" in chosen.reason


def test_nc4_breaks_ties_of_collapsed_layers() -> None:
    chosen = report(("a", 4, 0.1, 0.9), ("b", 4, 0.1, 0.5), ("p", 8, 0.05, 0.9), ("o", 2, 0.1, 0.9)).choose()
    assert chosen.layers == ("a",)


def test_pattern_limits_choice() -> None:
    limited = report(("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("p", 8, 0.7, 0.99), ("o", 2, 0.1, 0.9), pattern="^a$")
    assert limited.choose().layers == ("a",)
    assert limited.penultimate == "p"
    with pytest.raises(UsageError, match="no layer before the output"):
        replace(limited, pattern="^o$").choose()


def test_table_marks_candidate_and_explains() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("layer1.conv", 4, 0.6, 0.8), ("p", 8, 0.1, 0.99), ("o", 2, 0.1, 0.9))
    lines = to_text(measured, measured.choose()).splitlines()
    assert lines[0].split() == ["#", "layer", "form", "channels×spatial", "NC1", "NC4"]
    assert lines[2].split() == ["1", "layer1.conv", "map", "4×4", "0.6000", "0.8000", "◀", "chosen"]
    assert lines[3].endswith("penultimate") and lines[4].endswith("output")
    assert lines[5].startswith("chosen layer: layer1.conv") and lines[6].startswith("penultimate: p")
    assert len(lines) == 7
    assert lines[1].index("0.9000") == lines[2].index("0.6000")
    named = to_text(measured, measured.choose("p")).splitlines()
    assert named[3].endswith("◀ chosen  penultimate") and not any(line.startswith("penultimate:") for line in named)


def test_csv() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    lines = list(csv.DictReader(to_csv(measured).splitlines()))
    assert lines[1] == {
        "index": "1",
        "layer": "p",
        "form": "map",
        "channels": "8",
        "spatial": "4",
        "role": "penultimate",
        "nc1": "0.1",
        "nc4": "0.99",
    }


SETTINGS = FitSettings(device="cpu", batch_images=50)


@pytest.fixture(scope="module")
def turned(data_root: Path) -> tuple[ImageDataset, ImageDataset]:
    train, val = (
        open_dataset(f"rotated-mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
        for split in ("train", "val")
    )
    return binned(train.subset(torch.arange(300)), val)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 1)
    ).eval()


def test_equals_ridge_on_whole_matrices(turned: tuple[ImageDataset, ImageDataset]) -> None:
    train, val = turned
    net = network()
    report = measured(net, train, val, SETTINGS.changed({"granularity": "all"}))
    assert report.measure is LinearFit and train.values is not None and val.values is not None
    pixels = [train.preprocess.standardise(next(data.batches(len(data))).images) for data in turned]
    with torch.inference_mode():
        x, x_val = (net[:5](part).double() for part in pixels)
    best = max(
        Ridge(alpha=float(alpha)).fit(x, train.values).score(x_val, val.values) for alpha in torch.logspace(-6, 4, 40)
    )
    got = report.layer("4").quality
    assert best - 0.02 < got <= best + 1e-6
    chosen = report.choose()
    assert LinearFit.name in chosen.reason and LinearFit.name in to_text(report, chosen) and ",r2" in to_csv(report)
    assert CollapseReport.from_json(report.to_json()) == report
    assert min(layer.quality_error for layer in report.layers if layer.quality_error is not None) == 0.0


def test_small_budgets_make_more_groups(turned: tuple[ImageDataset, ImageDataset]) -> None:
    train, val = turned
    whole, few = (
        measured(network(), train, val, SETTINGS.changed({"max_memory": budget})) for budget in (1 << 30, 1 << 14)
    )
    for one, other in zip(whole.layers, few.layers, strict=True):
        assert one.quality == pytest.approx(other.quality, abs=1e-9)


def summed(x: torch.Tensor, y: torch.Tensor, batch: int = 7) -> torch.Tensor:
    sums = torch.zeros(x.shape[1] + 2, x.shape[1] + 2, dtype=torch.float64)
    for part_x, part_y in zip(x.split(batch), y.split(batch), strict=True):
        add_products(sums, part_x, part_y)
    return sums


def naive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Predictions by the definition: every penalty tried, hat matrix and all."""
    n, centred = len(x), x - x.mean(0)
    best, prediction = float("inf"), y.mean().expand(n)
    scale = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0).mean()
    for penalty in (PENALTIES * scale).tolist():
        hat = centred @ torch.linalg.solve(centred.T @ centred + penalty * torch.eye(x.shape[1]).double(), centred.T)
        fitted = y.mean() + hat @ (y - y.mean())
        gcv = float((y - fitted).square().sum() / max(float(n - 1 - hat.trace()), 1e-3) ** 2)
        if gcv < best:
            best, prediction = gcv, fitted
    return prediction


@given(st.integers(0, 10_000), st.integers(3, 40), st.integers(1, 6))
def test_equals_its_definition(seed: int, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 5 + torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = x[:, 0] * 3 + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    fitted = fit_ridge(summed(x, y))
    ours, theirs = fitted(x), naive(x, y)
    left = [float((y - prediction).square().sum()) for prediction in (ours, theirs)]
    assert left[0] == pytest.approx(left[1], rel=1e-3, abs=1e-6)
    if n > 3 * d:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_constant_features_predict_the_mean() -> None:
    y = torch.arange(9.0).double()
    fitted = fit_ridge(summed(torch.full((9, 3), 2.0).double(), y))
    torch.testing.assert_close(fitted(torch.ones(2, 3).double()), torch.full((2,), 4.0).double(), atol=1e-9, rtol=0)


def test_narrow_features_are_not_sketched() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(count_sketch(8)(x), x.double())


def test_a_sketch_keeps_a_linear_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "SKETCH", 64)
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(2000, 5, generator=generator)
    x = low @ torch.randn(5, 4000, generator=generator)
    sketch, y = count_sketch(4000), low[:, 0].double()
    fitted = fit_ridge(summed(sketch(x[:1000]), y[:1000]))
    errors = (fitted(sketch(x[1000:])) - y[1000:]).square()
    assert r_squared(errors, y[1000:]) > 0.99
    once = sketch(torch.eye(4000)).abs()
    assert (once.sum(1) == 1).all() and (once.sum(0) > 20).all(), "each feature is added to one column"
    whole = sketch(torch.eye(4000)).T @ x[0].double()
    torch.testing.assert_close(sketch(x[:1])[0], whole, atol=2e-3, rtol=1e-4)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 2**31))
def test_paired_error_equals_twin(labels_each: list[int], seed: int) -> None:
    one, other = torch.randint(0, 2, (2, sum(labels_each)), generator=torch.Generator().manual_seed(seed)).bool()
    counts = torch.tensor(labels_each)
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    error = paired_error(one, other, functional.pad(counts.cumsum(0), (1, 0)))
    assert error == pytest.approx(reference.paired_error(one.tolist(), other.tolist(), owners.tolist()), rel=1e-12)
    if max(labels_each) == 1:
        assert error == pytest.approx(math.sqrt(int((one ^ other).sum())) / len(one), rel=1e-12)


def test_groups_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "MIN_COLUMNS", 1)
    layers = list_layers(Net(), torch.zeros(1, 1, 6, 6))
    groups = collapse.layer_groups(layers, classes=10, batch_images=8, budget=6000)
    rounds = [
        [(layer, range(math.prod(layer.shape))[part]) for layer in group] for group, parts in groups for part in parts
    ]
    assert len(groups) == 2 and [[(layer.name, part) for layer, part in each] for each in rounds] == [
        [("conv", range(49))],
        [("conv", range(49, 64))],
        [("pool", range(16)), ("hidden", range(5)), ("out:input", range(5)), ("out", range(3))],
    ]
    for each in rounds:
        assert sum(4 * 8 * math.prod(layer.shape) + 8 * 10 * len(part) for layer, part in each) <= 6000
