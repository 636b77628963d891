from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from psc_core import PSC, FitSettings, fit_projection, fit_psc, measure_collapse, open_loader
from psc_core.answers import Target
from psc_core.collapse import ChosenLayer
from psc_core.data import cache
from psc_core.data.cache import CachedSource, Scratch
from psc_core.data.dataset import ArraySource, ImageDataset, number_images, split_validation
from psc_core.data.open import image_folder
from psc_core.errors import DataError, UsageError
from psc_core.fit_data import FitData, FitJob
from psc_core.images.preprocess import Preprocess
from psc_core.projection import FittedProjection
from tests.psc_core.data.support import TINY, write_folder

SETTINGS = FitSettings(device="cpu")


def test_rejects_other_classes_or_fewer_than_two(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    with pytest.raises(DataError, match=r"unknown: x; missing: 9"):
        measure_collapse(net, train, replace(val, classes=(*val.classes[:-1], "x")), settings=SETTINGS)
    alone = [replace(data, classes=("all",), labels=torch.zeros_like(data.labels)) for data in (train, val)]
    with pytest.raises(DataError, match="at least two classes"):
        measure_collapse(net, *alone, settings=SETTINGS)


def test_labels_go_by_the_names_of_the_training_images(train: ImageDataset, val: ImageDataset) -> None:
    moved = FitData.of(train, replace(val, classes=val.classes[::-1])).val
    assert moved.classes == train.classes and torch.equal(moved.labels, 9 - val.labels)


@pytest.mark.parametrize("count", [0, 1])
def test_rejects_classes_of_too_few_images(net: nn.Module, train: ImageDataset, val: ImageDataset, count: int) -> None:
    labels = train.labels.clone()
    labels[labels == 3] = 4
    labels[:count] = 3
    with pytest.raises(DataError, match=f"two training images of each class, got {count} of '3'"):
        measure_collapse(net, replace(train, labels=labels), val, settings=SETTINGS)
    with pytest.raises(DataError, match=f"two training images of each class, got {count} of '3'"):
        fit_projection(net, ChosenLayer(("4",), ""), replace(train, labels=labels), settings=SETTINGS)


def test_halves_are_split_once_and_stay_with_their_images(train: ImageDataset, val: ImageDataset) -> None:
    data = FitData.of(train, val, seed=3)
    assert (replace(data.train, given=None), data.val, data.task_type.name) == (train, val, "classification")
    halves = split_validation(val, 3)
    for half, expected in zip((data.selection, data.calibration), halves, strict=True):
        assert torch.equal(half.indices, expected.indices)
    kept, _ = data.cached(Scratch())
    assert kept.selection.source is kept.calibration.source is kept.val.source
    fewer = data.fewer(100, 40)
    assert (len(fewer.train), len(fewer.selection), len(fewer.calibration)) == (100, 20, 20)
    assert len(FitData.of(train, val, max_images=50).train) == 50
    with pytest.raises(UsageError, match=r"--max-images of at least 20,.* got 19"):
        FitData.of(train, val, max_images=19)


@pytest.mark.parametrize("changes", [{"height": 32, "width": 32}, {"resizer": "pillow"}])
def test_every_door_refuses_validation_images_with_other_preprocessing(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, changes: dict[str, Any]
) -> None:
    chosen, other = ChosenLayer(("4",), "by hand"), replace(val, preprocess=replace(val.preprocess, **changes))
    doors = (
        lambda: PSC.fit(net, train, other),
        lambda: measure_collapse(net, train, other, settings=SETTINGS),
        lambda: fit_projection(net, chosen, train, other, settings=SETTINGS),
        lambda: fit_psc(net, chosen, projection, train, other, settings=SETTINGS),
    )
    for door in doors:
        with pytest.raises(UsageError, match=rf"preprocessing L.*, got L.*another {', '.join(changes)}; open both"):
            door()


def test_loaders_that_describe_the_same_are_fitted_together() -> None:
    def opened(count: int, **description: Any) -> ImageDataset:
        return open_loader([(torch.rand(count, 1, 4, 4), torch.arange(count) % 2)], **description)

    described = {"mean": (0.485,), "std": (0.229,)}
    as_tensors = {name: torch.tensor(values) for name, values in described.items()}
    assert FitData.of(opened(8, **described), opened(8, **as_tensors))
    whole = opened(8, preprocess=Preprocess("L", 4, 4, None, (0.485,), (0.229,)))
    assert FitData.of(whole, opened(8, **described))
    assert FitData.of(opened(8), opened(8)), "two that say nothing, with other ranges"
    with pytest.raises(UsageError, match=r"4 × 4 inputs from a loader.* with another description; open both"):
        FitData.of(whole, opened(8))
    small = open_loader([(torch.rand(8, 1, 2, 2), torch.arange(8) % 2)])
    with pytest.raises(UsageError, match=r"4 × 4 inputs .*2 × 2 inputs .* another shape; open both"):
        FitData.of(opened(8), small)


def test_images_without_validation_stand_for_it(train: ImageDataset) -> None:
    data = FitData.of(train, None, max_images=50)
    assert data.train is data.selection and data.task_type.takes(train) and len(data.train) == 50


@pytest.fixture
def folders(tmp_path: Path) -> FitData:
    """Two classes; of the training images one cannot be decoded, of the validation images two of class b."""
    train, val = (write_folder(tmp_path / name, {"a": 6, "b": 6}) for name in ("train", "val"))
    for file in (train / "a" / "1.png", val / "b" / "0.png", val / "b" / "5.png"):
        file.write_bytes(b"text")
    return FitData.of(image_folder(train, TINY), image_folder(val, TINY), seed=3)


def test_the_first_evaluation_tells_of_unused_levels(tmp_path: Path) -> None:
    train, val = (write_folder(tmp_path / name, {"a": 4, "b": 12}) for name in ("train", "val"))
    for file in train.glob("*/*.png"):
        Image.fromarray(np.arange(4, dtype=np.uint16).reshape(2, 2) * 1365).save(file)
    data = FitData.of(image_folder(train, TINY), image_folder(val, TINY))
    settings = SETTINGS.changed({"alpha": 0.5, "coverage": 0.5})
    job = FitJob(data, settings, settings.compute())
    net = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    assert "reach only level 16 of 255" in job.first_evaluation(net).warning
    assert "level" not in replace(job, data=replace(data, train=data.val)).first_evaluation(net).warning


def test_says_that_images_are_not_kept(folders: FitData, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, said = folders.cached(Scratch())
    assert said == () and isinstance(kept.train.source, CachedSource) and isinstance(kept.val.source, CachedSource)
    assert folders.cached(None) == (folders, ())
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    same, (said,) = folders.cached(Scratch())
    assert same == folders and "--cache DIR" in said
    monkeypatch.undo()
    monkeypatch.setattr(cache.os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    assert folders.cached(Scratch())[1] == (said,)


def test_leaves_out_what_cannot_be_decoded(folders: FitData, tmp_path: Path) -> None:
    data, said = folders.readable(3)
    assert (len(data.train), len(data.val), data.skipped) == (11, 10, (1, 2))
    assert len(data.selection) == len(data.calibration) == 5
    assert sorted([*data.selection.indices.tolist(), *data.calibration.indices.tolist()]) == [*range(6), *range(7, 11)]
    assert [line.partition(": ")[0] for line in said[:3]] == ["left out"] * 3
    assert said[3] == f"left out 3 that cannot be decoded: 1 of {tmp_path / 'train'}, 2 of {tmp_path / 'val'}"
    (tmp_path / "train" / "a" / "1.png").unlink(), (tmp_path / "val" / "b" / "0.png").unlink()
    (tmp_path / "val" / "b" / "5.png").unlink()
    without = FitData.of(*(image_folder(tmp_path / name, TINY) for name in ("train", "val")), seed=3)
    for name in ("train", "val", "selection", "calibration"):
        assert getattr(data, name).digest() == getattr(without, name).digest(), name
    assert data.readable(3) == (data, ())


def test_knows_where_the_images_stood_that_are_left(folders: FitData) -> None:
    few = FitData.of(folders.train, folders.val, max_images=9, seed=1)
    kept, _ = few.cached(Scratch())
    kept, _ = kept.readable(3)
    assert kept.skipped[0] == 1 and len(kept.train) == 8  # The damaged one is among the nine.
    for position in range(8):
        given = int(kept.train.positions_given(torch.tensor(position)))
        assert np.array_equal(kept.train.image(position), folders.train.image(given))


def test_what_is_left_keeps_its_labels(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", {"a": 120, "b": 120})
    (images / "a" / "3.png").write_bytes(b"text")
    source = image_folder(images, TINY).source
    numbers = torch.arange(240.0, dtype=torch.float64)
    good = replace(number_images("good", Target(name="age"), source, numbers, TINY), name="good")
    data = FitData.of(good.subset(torch.arange(120, 240)), good, max_images=100)
    kept, _ = data.readable(1)
    assert kept.skipped == (0, 1) and kept.train is data.train
    assert len(kept.train.classes) == len(data.train.classes) and kept.val.classes == data.val.classes


def test_too_many_that_cannot_be_decoded_end_the_fit(folders: FitData) -> None:
    with pytest.raises(DataError, match=r"at most 2 images that cannot .* found more: .*1\.png: .*--max-bad-images"):
        folders.readable(2)
    assert folders.readable(0) == (folders, ())


def test_a_class_without_images_that_can_be_decoded_ends_the_fit(folders: FitData, tmp_path: Path) -> None:
    for number in range(5):
        (tmp_path / "train" / "a" / f"{number}.png").write_bytes(b"")
    with pytest.raises(DataError, match="at least two training images of each class, got 1 of 'a'; add images of it"):
        folders.readable(10)


def test_a_half_of_equal_numbers_is_refused() -> None:
    def ages(values: list[float]) -> ImageDataset:
        source = ArraySource(np.zeros((len(values), 3, 3), np.uint8))
        return number_images("some", Target(name="age"), source, torch.tensor(values), TINY)

    train, alike = ages([float(number) for number in range(60)]), ages([0.0] * 40)
    for index in (0, 39):  # One number that differs is in one half.
        mixed = replace(alike, values=torch.where(torch.arange(40) == index, 3.0, 0.0).double())
        with pytest.raises(DataError, match="of some all 20 are 0; give more images"):
            FitData.of(train, mixed)
    assert len(FitData.of(train, train).selection) == 30


def test_rejects_another_task_target_or_network(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    source, two = ArraySource(np.zeros((2, 3, 3), np.uint8)), torch.tensor([1.0, 2.0])
    age, dose = (number_images("some", Target(name=name), source, two, TINY) for name in ("age", "dose"))
    with pytest.raises(DataError, match="got age and dose"):
        FitData.of(age, dose)
    for task, said in (("regression", "the task of these images is classification"), ("sorting", "got 'sorting'")):
        with pytest.raises(UsageError, match=said):
            FitData.of(train, val, task=task)
    wide = torch.nn.Sequential(*list(net)[:-1], torch.nn.Linear(16, 20)).eval()  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="10 outputs for mnist, got 20"):
        fit_psc(wide, ChosenLayer(("4",), ""), projection, train, val, predictions="original", settings=SETTINGS)
