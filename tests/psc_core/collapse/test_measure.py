from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn

from psc_core import collapse as columns
from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.errors import FitError, UsageError
from psc_core.images.preprocess import Preprocess
from psc_core.network.layers import canonical, list_layers
from psc_core.settings import FitSettings
from tests.psc_core.collapse.support import measured
from tests.reference import collapse as reference

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
    monkeypatch.setattr(columns, "MIN_COLUMNS", 7)
    net, train, val = Net(), images(0, 40), images(1, 21, torch.randint(0, 3, (21, 2)))
    layers, whole = list_layers(net, torch.zeros(1, 1, 6, 6)), measured(net, train, val, on_cpu(8))
    parts = measured(net, train, val, on_cpu(8, max_memory=budget))
    assert sum(len(ranges) for _, ranges in columns.layer_groups(layers, 3, 8, budget)) > 1
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
    assert report.candidate().layers[0] in ("conv", "hidden")


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
    assert stale.nc1 == 0 and report.candidate().layers == ("first",)
