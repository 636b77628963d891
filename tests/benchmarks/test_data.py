from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import data
from benchmarks.checkpoints import Job
from psc_core.data.spec import open_dataset
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
    known = open_split(f"benchmarks.data:cifar10_known_{number}")
    unknown = open_split(f"benchmarks.data:cifar10_unknown_{number}")
    assert known.classes == tuple(whole.classes[c] for c in data.KNOWN_CLASSES[number])
    assert set(known.classes).isdisjoint(unknown.classes)
    both = torch.cat([known.indices, unknown.indices])
    assert torch.equal(both.sort().values, whole.indices)


def test_labels_index_the_kept_classes(root: Path) -> None:
    whole, kept = open_split(f"mnist:{root}"), open_split("benchmarks.data:mnist_known_1")
    old = [whole.classes[label] for label in whole.first_labels()[torch.isin(whole.indices, kept.indices)].tolist()]
    assert [kept.classes[label] for label in kept.first_labels().tolist()] == old


def test_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(data.ROOT_VARIABLE, raising=False)
    with pytest.raises(DataError, match=data.ROOT_VARIABLE):
        open_split("benchmarks.data:cifar10_known_0")


def test_random_images_are_reproducible_and_ordered(root: Path) -> None:
    whole = open_split(f"mnist:{root}")
    drawn = data.random_images(whole, 20)
    assert torch.equal(drawn.indices, data.random_images(whole, 20).indices)
    assert len(drawn) == 20
    assert bool((drawn.indices.diff() > 0).all())
    assert data.random_images(whole, None) is whole


def test_few_training_images_keep_the_test_set(root: Path) -> None:
    few = open_split("benchmarks.data:cifar10_few_2000", "train")
    whole = open_split(f"cifar10:{root}", "train")
    assert len(few) == min(2000, len(whole)) and bool(torch.isin(few.indices, whole.indices).all())
    assert len(open_split("benchmarks.data:cifar10_few_2000")) == len(open_split(f"cifar10:{root}"))
    augmented = {
        name: Job("resnet18", name, 1).augment for name in ("mnist", "cifar10", "benchmarks.data:cifar10_known_3")
    }
    assert augmented == {"mnist": False, "cifar10": True, "benchmarks.data:cifar10_known_3": True}
    assert not Job("resnet18", "benchmarks.data:cifar10_few_2000", 1).augment
