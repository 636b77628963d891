from __future__ import annotations

import json
import math
from dataclasses import replace
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
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.errors import FitError, UsageError
from psc_core.images.preprocess import Preprocess
from psc_core.linalg import r_squared
from psc_core.network.layers import list_layers
from psc_core.settings import FitSettings
from psc_core.tasks import task_of_images
from psc_core.tasks.regression import Regression
from tests.opened import opened
from tests.reference import collapse as reference

Images = tuple[ImageDataset, ImageDataset]


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
    return label_images("noise", [str(c) for c in range(classes)], ArraySource(pixels), labels, PLAIN)


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


@pytest.mark.parametrize("budget", [1, 2500])
def test_groups_and_column_ranges_change_nothing(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collapse, "MIN_COLUMNS", 7)
    net, train, val = Net(), images(0, 40), images(1, 21, torch.randint(0, 3, (21, 2)))
    layers, whole = list_layers(net, torch.zeros(1, 1, 6, 6)), measured(net, train, val, on_cpu(8))
    parts = measured(net, train, val, on_cpu(8, max_memory=budget))
    assert sum(len(ranges) for _, ranges in collapse.layer_groups(layers, 3, 8, budget)) > 1
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert other.nc1 == pytest.approx(one.nc1, rel=1e-6)
        assert (other.quality, other.quality_error) == (one.quality, one.quality_error)


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


@pytest.mark.parametrize("budget", [1, 1 << 20])
@pytest.mark.parametrize("quality", [collapse.NearestMean, collapse.LinearFit])
def test_non_finite_features_of_one_validation_image_name_its_data(
    quality: type[collapse.LayerQuality], budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Divides(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x / (x.amax((1, 2, 3), keepdim=True) < 1))

    monkeypatch.setattr(collapse, "MIN_COLUMNS", 7)
    train, val = images(0, 40), images(1, 21)
    assert isinstance(val.source, ArraySource)
    val.source.images[4, 5, 5] = 255
    train, val = (replace(data, values=data.labels.double()) for data in (train, val))
    val = replace(val, name="the validation images")
    settings = on_cpu(max_memory=budget)
    with pytest.raises(FitError, match="layer conv gives NaN or infinity on the validation images; check the weights"):
        measure_layers(Divides(), train, val, settings, settings.compute(), quality)


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
    assert chosen.layers == ("p",) and table.nc4_of(chosen) == 0.99
    with pytest.raises(UsageError, match="did you mean bb"):
        table.choose("b")


def test_a_density_reads_a_penultimate_layer_that_has_collapsed() -> None:
    layers = (("a", 4, 0.9, 0.5), ("bb", 4, 0.6, 0.8), ("p", 8, 0.2, 0.7), ("o", 2, 0.1, 0.9))
    collapsed = report(*layers)  # NC1 = ε is collapsed.
    assert collapsed.choose().collapsed_penultimate == "p" == collapsed.choose("a").collapsed_penultimate
    assert collapsed.choose("p").collapsed_penultimate is None
    assert replace(collapsed, epsilon=0.19).choose("a").collapsed_penultimate is None
    assert replace(collapsed, measure=LinearFit).choose("a").collapsed_penultimate is None
    assert replace(collapsed.choose(), report=None).collapsed_penultimate is None
    constant = report(*layers[:2], ("p", 8, 0.0, 0.1), layers[3])
    assert constant.choose().collapsed_penultimate is None


def test_json_round_trip() -> None:
    measured = report(("a", 4, 0.9, 0.5), ("p", 8, 0.1, 0.99), output=False)
    assert CollapseReport.from_json(json.loads(json.dumps(measured.to_json()))) == measured
    assert {"quality", "quality_error"} <= {*measured.to_json()["layers"][0]}, "the names of docs/bundle-format.md"


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
def test_two_near_the_cutoff(chosen_nc1: float, next_nc1: float, next_channels: int, layers: tuple[str, ...]) -> None:
    chosen = report(
        ("a", 4, 0.9, 0.5),
        ("b", 4, chosen_nc1, 0.9),
        ("c", next_channels, next_nc1, 0.85),
        ("p", 8, 0.1, 0.9),
        ("o", 2, 0.1, 0.9),
    ).choose()
    assert chosen.layers == layers


def with_errors(measured: CollapseReport, *errors: float) -> CollapseReport:
    pairs = zip(measured.layers, errors, strict=True)
    return replace(measured, layers=tuple(replace(layer, quality_error=error) for layer, error in pairs))


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
    assert trunk.choose("a").layers == ("a",) and replace(trunk, pattern="[ab]").choose().layers == ("b",)
    assert replace(trunk, measure=LinearFit).choose().layers == ("b",)  # Shown for classes alone.
    assert replace(trunk, epsilon=0.35).choose().layers == ("b",)  # "p" has collapsed.


def test_notes_say_that_candidate_is_early() -> None:
    deeper = [(f"l{i}", 4, 0.1, 0.9) for i in range(6)]
    measured = report(("a", 4, 0.9, 0.5), ("b", 8, 0.6, 0.4), *deeper)
    (note,) = measured.choose().notes
    assert "--layer l4" in note
    assert measured.choose("a").notes == (note,)
    assert measured.choose("b").notes == () == measured.choose("l4").notes


def test_pattern_limits_choice() -> None:
    limited = report(("a", 4, 0.9, 0.5), ("b", 4, 0.6, 0.8), ("p", 8, 0.7, 0.99), ("o", 2, 0.1, 0.9), pattern="^a$")
    assert limited.choose().layers == ("a",)
    assert limited.penultimate == "p"
    with pytest.raises(UsageError, match="no layer before the output"):
        replace(limited, pattern="^o$").choose()


SETTINGS = FitSettings(device="cpu", batch_images=50)


@pytest.fixture(scope="module")
def turned() -> Images:
    train, val = (opened("rotated-mnist", split) for split in ("train", "val"))
    return Regression.labelled(train.subset(torch.arange(300)), val)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(72, 9), nn.ReLU(), nn.Linear(9, 1)
    ).eval()


def test_equals_ridge_on_whole_matrices(turned: Images) -> None:
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
    assert LinearFit.name in to_text(report, report.choose()) and ",r2" in to_csv(report)
    assert CollapseReport.from_json(report.to_json()) == report
    assert min(layer.quality_error for layer in report.layers if layer.quality_error is not None) == 0.0


def test_small_budgets_make_more_groups(turned: Images) -> None:
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
        freedom = float(n - 1 - hat.trace())
        gcv = float((y - fitted).square().sum()) / freedom**2 if freedom > 1 else float("inf")
        if gcv <= best:  # The largest penalty is the last, if all are infinite.
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


def test_noise_is_not_interpolated_with_more_columns_than_images() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 400, generator=generator, dtype=torch.float64)
    y = torch.randn(200, generator=generator, dtype=torch.float64)
    assert float((fit_ridge(summed(x, y))(x) - y).square().mean()) > 0.1


def test_two_images_take_the_largest_penalty() -> None:
    x, y = torch.tensor([[0.0, 1.0], [2.0, 0.0]]).double(), torch.tensor([0.0, 1.0]).double()
    torch.testing.assert_close(fit_ridge(summed(x, y))(x), naive(x, y))
    assert float((naive(x, y) - 0.5).abs().max()) < 0.01


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
    assert [sum(len(part) for _, part in each) for each in rounds] == [49, 15, 16 + 5 + 5 + 3]
    for each in rounds:
        assert sum(4 * 8 * math.prod(layer.shape) + 8 * 10 * len(part) for layer, part in each) <= 6000


@pytest.mark.parametrize("several", [False, True])
def test_every_layer_equals_naive_loop(several: bool) -> None:
    net, generator = Net().eval(), torch.Generator().manual_seed(0)
    many = [torch.randint(0, 3, (count, 4), generator=generator) if several else None for count in (40, 33)]
    train, val = images(0, 40, many[0]), images(1, 33, many[1])
    report = measured(net, train, val, on_cpu(16))
    assert [layer.name for layer in report.layers] == ["conv", "pool", "hidden", "out:input", "out"]
    assert (report.train_examples, report.val_examples) == ((160, 132) if several else (40, 33))
    hits = {}
    for layer in report.layers:
        features, labels = examples_of(net, layer.name, train)
        of_val = examples_of(net, layer.name, val)
        assert layer.nc1 == pytest.approx(reference.nc1(features, labels, 3), rel=1e-6)
        assert layer.quality == reference.nc4(features, labels, *of_val, 3)
        hits[layer.name] = reference.hits(features, labels, *of_val, 3)
    assert report.best is not None
    owners = np.repeat(np.arange(33), 4 if several else 1).tolist()
    expected = [reference.paired_error(hits[layer.name], hits[report.best.name], owners) for layer in report.layers]
    assert max(expected) > 0
    assert [layer.quality_error for layer in report.layers] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ([("a", 4, 0.5, 0.3), ("p", 8, 0.2, 0.9), ("o", 2, 0.1, 0.9)], "a"),  # NC1 at the cutoff does not pass.
        ([("a", 4, 0.5, 0.3), ("p", 2, 0.21, 0.9), ("o", 2, 0.2, 1.0)], "p"),  # The output is never taken.
        ([("a", 4, 0.19, 0.3), ("p", 8, 0.1, 0.9), ("o", 2, 0.9, 0.9)], "a"),  # None passes.
        ([("a", 4, 0.1, 0.9), ("b", 4, 0.1, 0.5), ("p", 8, 0.05, 0.9), ("o", 2, 0.1, 0.9)], "a"),  # NC4 breaks ties.
    ],
)
def test_rule_at_its_edges(layers: list[tuple[str, int, float, float]], chosen: str) -> None:
    assert report(*layers).choose().layers == (chosen,)
