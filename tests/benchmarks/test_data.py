"""Data sets with classes held out, and random subsets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import data
from psc_core.data.open import open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch, data_root: Path) -> Path:
    monkeypatch.setenv(data.ROOT_VARIABLE, str(data_root))
    return data_root


def open_split(spec: str, split: str = "test") -> data.ImageDataset:
    return open_dataset(spec, split=split, preprocess=PRESETS["cifar10" if "cifar10" in spec else "mnist"])


@pytest.mark.parametrize("number", range(5))
def test_known_and_unknown_classes_are_complementary(root: Path, number: int) -> None:
    whole = open_split(f"cifar10:{root}")
    known, unknown = (open_split(f"benchmarks.data:cifar10_{kind}_{number}") for kind in ("known", "unknown"))
    assert known.classes == tuple(whole.classes[c] for c in data.KNOWN_CLASSES[number])
    assert set(known.classes).isdisjoint(unknown.classes)
    assert torch.equal(torch.cat([known.indices, unknown.indices]).sort().values, whole.indices)
    old = [whole.classes[label] for label in whole.first_labels()[torch.isin(whole.indices, known.indices)].tolist()]
    assert [known.classes[label] for label in known.first_labels().tolist()] == old


def test_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.ROOT_VARIABLE, raising=False)
    with pytest.raises(DataError, match=data.ROOT_VARIABLE):
        open_split("benchmarks.data:cifar10_known_0")


def test_random_images_are_reproducible_and_ordered(root: Path) -> None:
    whole = open_split(f"mnist:{root}")
    drawn = data.random_images(whole, 20)
    assert torch.equal(drawn.indices, data.random_images(whole, 20).indices)
    assert len(drawn) == 20 and bool((drawn.indices.diff() > 0).all())
    assert data.random_images(whole, None) is whole


def test_few_training_images_keep_the_test_set(root: Path) -> None:
    few, whole = (open_split(spec, "train") for spec in ("benchmarks.data:cifar10_few_5000", f"cifar10:{root}"))
    assert len(few) == min(5000, len(whole)) and bool(torch.isin(few.indices, whole.indices).all())
    assert len(open_split("benchmarks.data:cifar10_few_5000")) == len(open_split(f"cifar10:{root}"))
