"""What a fit keeps does not grow with the images but for labels and positions: bytes are counted, not measured."""

import weakref
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from psc_core import FitSettings, features, fit_projection, fit_psc, measure_collapse
from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.heads import softmax
from psc_core.images.preprocess import PRESETS
from psc_core.linalg import ClassScatter, class_pairs

BYTES_AN_IMAGE = 100  # Labels, offsets and positions, and as much again while they are put in order


CLASSES = 4
SETTINGS = FitSettings(device="cpu")


class LiveBytes(TorchDispatchMode):
    """Maximum bytes of tensors alive at a time, of those that any operation of this thread reads or makes."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: Counter[int] = Counter()
        self.bytes = 0
        self.maximum = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in (*_tensors(args), *_tensors(out)):
            storage = tensor.untyped_storage()
            address, size = storage.data_ptr(), storage.nbytes()
            self.bytes += size * (self.tensors[address] == 0)
            self.tensors[address] += 1
            weakref.finalize(tensor, self._ended, address, size)
        self.maximum = max(self.maximum, self.bytes)
        return out

    def _ended(self, address: int, size: int) -> None:
        self.tensors[address] -= 1
        self.bytes -= size * (self.tensors[address] == 0)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield from [value] if value.layout == torch.strided else []  # fused weights are opaque, and few
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def repeated(images: int, seed: int, distinct: int = 200) -> ImageDataset:
    """Noise from ``seed`` with a class-dependent corner, ``distinct`` images again and again."""
    labels = torch.arange(distinct) % CLASSES
    pixels = np.random.default_rng(seed).integers(0, 128, (distinct, 28, 28), dtype=np.uint8)
    pixels[:, :14, :14] += (labels.numpy()[:, None, None] * 30).astype(np.uint8)
    once = label_images("repeated", list("abcd"), ArraySource(pixels), labels, PRESETS["mnist"])
    at = torch.arange(images) % distinct
    return replace(once, indices=at, labels=labels[at], offsets=torch.arange(images + 1))


def maximum_bytes(images: int) -> int:
    """Of a whole fit with the default density and head."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 64, 7, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    net = net.append(nn.Linear(64, CLASSES)).eval()
    train, val = repeated(images, seed=0), repeated(200, seed=1)
    with LiveBytes() as live:
        chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("0")
        projected = fit_projection(net, chosen, train, val, c_proj=64, d_proj=8, settings=SETTINGS)
        fit_psc(net, chosen, projected, train, val, settings=SETTINGS)
    return live.maximum


def test_memory_does_not_grow_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 1 << 16)
    monkeypatch.setattr(features, "KEPT", 1 << 30)  # Else features are kept up to a quarter of the budget.
    monkeypatch.setattr(softmax, "SAMPLE_VALUES", 577 * 500)
    monkeypatch.setattr(softmax, "KEPT_VALUES", 576 * 500)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1e2, 1e1))
    few, many = 1100, 1700  # rows of 576 columns: more than any block, and than the sample of the curvature
    growth = (maximum_bytes(many) - maximum_bytes(few)) / (many - few)
    assert growth < BYTES_AN_IMAGE, f"{growth:.0f} bytes an image"


class Float64Entries(TorchDispatchMode):
    """The largest float64 tensor that any operation made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        made = [tensor.numel() for tensor in _tensors(out) if tensor.dtype == torch.float64]
        self.largest = max(self.largest, *made, 0)
        return out


def test_no_float64_copy_of_a_batch() -> None:
    images, dim, classes = 64, 50_000, 2
    features, sums = torch.randn(images, dim), ClassScatter(classes, dim)
    pairs = class_pairs(torch.arange(images) * classes // images, torch.arange(images))
    with Float64Entries() as seen:
        sums.add(features, pairs)
    assert classes * dim <= seen.largest <= 1 << 17 and seen.largest < features.numel() / 20
