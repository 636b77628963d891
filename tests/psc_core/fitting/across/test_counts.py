"""What a fit costs, counted: passes over the images, and float64 entries alive at once.  No clock is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from psc_core import FitSettings, fit_projection, fit_psc
from psc_core.compute import MAX_CPU_BATCH, Compute
from psc_core.heads import softmax
from psc_core.linalg import ClassScatter, class_pairs
from psc_core.model import TRIAL_IMAGES
from tests import tiny
from tests.psc_core.fitting.support import counted, typical
from tests.psc_core.test_collapse import measured

SETTINGS = FitSettings(device="cpu")


def test_fit_reads_training_images_four_times(data_root: Path) -> None:
    """Collapse, moments, sizes, features; the selection split six times, the other once and its trial twice."""
    net = tiny.network().eval()
    (train, train_reads), (val, val_reads) = counted(data_root, "train"), counted(data_root, "val")
    chosen = measured(net, train, val, SETTINGS).choose("4")
    assert (typical(train_reads), set(val_reads.values())) == (1, {1})
    train_reads.clear(), val_reads.clear()
    projection = fit_projection(net, chosen, train, val, minimum_dim=8, settings=SETTINGS)
    assert typical(train_reads) == 2
    assert set(val_reads.values()) == {1} and len(val_reads) == len(val) // 2
    train_reads.clear(), val_reads.clear()
    fit_psc(net, chosen, projection, train, val, settings=SETTINGS)
    assert typical(train_reads) == 1
    calibrating = len(val) - len(val) // 2
    assert sorted(val_reads.values()) == [1] * (calibrating - TRIAL_IMAGES) + [2] * TRIAL_IMAGES + [4] * (len(val) // 2)
    train_reads.clear(), val_reads.clear()
    fit_psc(net, chosen, projection, train, val, ood_score="density", settings=SETTINGS)
    assert set(train_reads.values()) == {1}
    assert sum(val_reads.values()) == len(val) + TRIAL_IMAGES and len(val_reads) == len(val)


def test_batch_size_on_a_cpu() -> None:
    assert Compute(torch.device("cpu"), batch_images=10_000).batch_size == MAX_CPU_BATCH
    assert Compute(torch.device("cpu"), batch_images=3).batch_size == 3
    assert Compute(torch.device("cuda"), batch_images=256).batch_size == 256


class FirstConvolution(TorchDispatchMode):
    """Images that went through the convolution of the only input channel."""

    def __init__(self) -> None:
        super().__init__()
        self.images = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "conv" in str(func) and args[1].shape[1] == 1:
            self.images += len(args[0])
        return func(*args, **(kwargs or {}))


def test_collapse_takes_one_forward_pass(data_root: Path) -> None:
    (train, _), (val, _) = counted(data_root, "train"), counted(data_root, "val")
    net = tiny.network().eval()
    with FirstConvolution() as seen:
        measured(net, train, val, SETTINGS)
    examples = seen.images - len(train) - len(val)
    assert 0 < examples <= 16


class Float64Entries(TorchDispatchMode):
    """The largest float64 tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in _tensors(out):
            if tensor.dtype == torch.float64:
                self.largest = max(self.largest, tensor.numel())
        return out


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def test_no_float64_copy_of_a_batch() -> None:
    images, dim, classes = 64, 50_000, 2
    features = torch.randn(images, dim)
    sums = ClassScatter(classes, dim)
    pairs = class_pairs(torch.arange(images) * classes // images, torch.arange(images))
    with Float64Entries() as seen:
        sums.add(features, pairs)
    assert classes * dim <= seen.largest <= 1 << 17
    assert seen.largest < features.numel() / 20


@pytest.mark.parametrize(("images", "maximum"), [(2000, 140), (40_000, 60)])
def test_passes_over_the_features(images: int, maximum: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluations of the whole path of prior precisions; fewer where the curvature is measured as it is."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(images) % 5
    z = torch.randn(5, 12, generator=random)[labels] + torch.randn(images, 12, generator=random)
    calls, objective = [], softmax.objective
    monkeypatch.setattr(softmax, "objective", lambda *args, **named: calls.append(1) or objective(*args, **named))
    softmax.choose_softmax(z, labels, z[:500], labels[:500], num_classes=5)
    assert len(calls) <= maximum
