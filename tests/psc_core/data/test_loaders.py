from __future__ import annotations

import inspect
import io
import tempfile
from collections import UserDict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset, TensorDataset
from torchvision.datasets import ImageFolder

from psc_core import PRESETS, open_dataset, open_loader
from psc_core.data import cache
from psc_core.data.dataset import ImageDataset
from psc_core.data.loaders import JOINED, LoaderDescription, ObservedPreprocess
from psc_core.errors import DataError, LoaderWarning, UsageError
from psc_core.images.preprocess import Preprocess
from tests.psc_core.data.support import write_folder

INPUTS = torch.rand(10, 3, 4, 5, generator=torch.Generator().manual_seed(0))
ARRAY = INPUTS.numpy().copy()  # Workers move the tensor to shared memory.
LABELS = torch.arange(10) % 3
NUMBERS = LABELS.numpy().copy()
PAIRS = TensorDataset(INPUTS, LABELS)
GREY = Preprocess("L", 3, 3, None, (0.5,), (0.5,))


class Stream(IterableDataset):  # type: ignore[type-arg]
    """Single examples of unknown number."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        yield from zip(INPUTS, LABELS.tolist(), strict=True)


class Counted(Stream):
    """The same of known number."""

    def __len__(self) -> int:
        return len(INPUTS)


class Plain:
    """A map-style data set that is no ``Dataset``, and whose iteration would not end by itself."""

    def __len__(self) -> int:
        return len(INPUTS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"pixel_values": INPUTS[index % 10], "labels": int(LABELS[index % 10])}


def everything(data: ImageDataset) -> tuple[torch.Tensor, torch.Tensor]:
    batches = list(data.batches(4))
    return torch.cat([batch.images for batch in batches]), torch.cat([batch.labels for batch in batches])


SPAWNED = {"num_workers": 2, "multiprocessing_context": "spawn"}


@pytest.mark.parametrize(
    "data",
    [
        DataLoader(PAIRS, batch_size=4),
        DataLoader(PAIRS, batch_size=4, **SPAWNED),  # type: ignore[arg-type]
        DataLoader(PAIRS, batch_size=None),
        DataLoader(Stream(), 4),
        PAIRS,
        Subset(PAIRS, range(10)),
        Stream(),
        Counted(),
        DataLoader(Counted(), batch_size=3),
        Plain(),
        list(PAIRS),
        [(INPUTS, LABELS)],
        ((INPUTS[at : at + 4], LABELS[at : at + 4]) for at in range(0, 10, 4)),
        [(INPUTS.double(), LABELS[:, None].int(), "a third thing")],
        [(ARRAY, NUMBERS)],
        [{"image": INPUTS, "label": LABELS.tolist()}],
        [UserDict(images=list(INPUTS), targets=list(LABELS))],
        [[list(ARRAY), LABELS.tolist()]],
    ],
    ids=lambda data: type(data).__name__,
)
def test_every_kind_of_loader_gives_the_same(data: Any) -> None:
    opened = open_loader(data, name="pairs")
    images, labels = everything(opened)
    assert torch.equal(images, INPUTS) and torch.equal(labels, LABELS)
    assert opened.classes == ("0", "1", "2") and opened.name == "pairs"
    assert isinstance(opened.preprocess, ObservedPreprocess)
    assert opened.image(0).dtype == np.uint8 and opened.image(0).shape == (3, 4, 5)


def test_labels_of_many_single_examples_are_joined() -> None:
    count = 2 * JOINED + 3
    labels = torch.randint(0, 5, (count,))
    opened = open_loader(list(zip(torch.rand(count, 1, 1, 1), labels, strict=True)), classes=[*"abcde"])
    assert torch.equal(opened.labels, labels)


def test_a_loader_is_iterated_once_in_its_order() -> None:
    times = []

    class Once:
        def __iter__(self) -> Iterator[Any]:
            times.append(1)
            return iter(DataLoader(PAIRS, batch_size=4, shuffle=True))

    images, labels = everything(open_loader(Once(), classes=("a", "b", "c", "d")))
    assert times == [1]
    rows = {image.sum().item(): int(label) for image, label in zip(images, labels, strict=True)}
    assert rows == {image.sum().item(): int(label) for image, label in zip(INPUTS, LABELS, strict=True)}


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4), st.sampled_from([1, 3]),
    st.integers(1, 6), st.integers(1, 6),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64]),
    st.sampled_from([torch.uint8, torch.int16, torch.int64, torch.bool]), st.booleans(),
)  # fmt: skip
def test_batches_of_any_size_and_type(
    sizes: list[int], channels: int, height: int, width: int, dtype: torch.dtype, label_type: torch.dtype, column: bool
) -> None:
    batches = [torch.rand(size, channels, height, width).to(dtype) for size in sizes]
    labels = [torch.randint(0, 2, (size, 1) if column else (size,)).to(label_type) for size in sizes]
    opened = open_loader(
        zip(batches, labels, strict=True), mean=(0.0,) * channels, std=(1.0,) * channels, classes=[*"ab"]
    )
    images, found = everything(opened)
    assert torch.equal(images, torch.cat(batches).float()) and images.dtype == torch.float32
    assert torch.equal(found, torch.cat(labels).flatten().long())
    assert opened.preprocess.shape == (channels, height, width) and opened.preprocess.is_known


def test_pictures_are_read_as_files_would_be(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 4, "b": 3})
    expected = everything(open_dataset(str(root), split="train", preprocess=GREY))
    folder = ImageFolder(str(root))
    paths = [(path, label) for path, label in folder.samples]
    arrays = [(np.asarray(image.convert("L")), label) for image, label in folder]
    tensors = [(torch.tensor(np.asarray(image)).permute(2, 0, 1), label) for image, label in folder]
    whole = [(torch.stack([image for image, _ in tensors]), folder.targets)]
    files = [([Path(path).read_bytes() for path, _ in paths], folder.targets)]
    loader = DataLoader(folder, batch_size=3, collate_fn=lambda items: tuple(zip(*items, strict=True)))
    for data in (folder, loader, paths, arrays, tensors, whole, files):
        opened = open_loader(data, preprocess=GREY, classes=folder.classes)
        images, labels = everything(opened)
        assert torch.equal(images, expected[0]) and torch.equal(labels, expected[1]) and images.dtype == torch.uint8
    with pytest.raises(UsageError, match=r"images, batch 0: .* \(a Image\) need preprocess=…"):
        open_loader(folder)


def test_numbers_of_a_regression() -> None:
    values = torch.rand(10, 1)
    opened = open_loader([(INPUTS, values)], target="age", unit="years")
    assert str(opened.target) == "age, years" and opened.values is not None
    assert torch.equal(opened.values, values[:, 0].double())
    whole = open_loader([(INPUTS, LABELS)], target="age")
    assert whole.values is not None and torch.equal(whole.values, LABELS.double())
    with pytest.raises(DataError, match=r"expected one number for each image, got labels of shape \(n, 2\)"):
        open_loader([(INPUTS, torch.rand(10, 2))], target="age")
    with pytest.raises(DataError, match=r"float32; class indices are whole numbers, .* PSCRegressor"):
        open_loader([(INPUTS, values)])


def test_several_labels_of_an_image_and_one_hot_ones() -> None:
    several = torch.stack([LABELS, (LABELS + 1) % 3], 1)
    opened = open_loader([(INPUTS, several)], classes=[*"abc"])
    assert opened.is_ambiguous and torch.equal(opened.labels, several.flatten())
    flags = torch.tensor([[1, 1, 0]] * 5 + [[0, 1, 1]] * 5)
    for odd in (torch.nn.functional.one_hot(LABELS, 3), torch.nn.functional.one_hot(LABELS, 5), flags):
        with pytest.raises(DataError, match=r"looks like one-hot labels .* give labels\.argmax\(1\)"):
            open_loader([(INPUTS, odd)], classes=[*"abc"])
    with pytest.raises(DataError, match="one label for each image"):
        open_loader([(INPUTS, torch.zeros(10, 2, 2, dtype=torch.int64))])


class DataFrame:
    """What tells a table of pandas from other objects."""

    def iterrows(self) -> Iterator[Any]:
        raise NotImplementedError


class Named(TensorDataset):
    """Pairs whose data set has what torchvision's and Hugging Face's have beside them."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(INPUTS, LABELS)
        vars(self).update(attributes)


ANIMALS = ["cat", "dog", "eel"]


@pytest.mark.parametrize(
    ("attributes", "classes"),
    [
        ({"classes": ANIMALS, "target_transform": None}, ("cat", "dog", "eel")),
        ({"features": {"image": None, "label": SimpleNamespace(names=ANIMALS)}}, ("cat", "dog", "eel")),
        ({"classes": ANIMALS, "class_to_idx": {"cat": 2, "dog": 0, "eel": 1}}, ("dog", "eel", "cat")),
        ({"classes": ANIMALS, "class_to_idx": {"cat": 0, "dog": 2, "eel": 2}}, ("0", "1", "2")),
        ({"classes": ANIMALS, "target_transform": abs}, ("0", "1", "2")),
        ({"classes": [*ANIMALS, "fox"]}, ("0", "1", "2")),
        ({"classes": ["cat", "cat", "eel"]}, ("0", "1", "2")),
        ({"classes": [1, 2, 3]}, ("0", "1", "2")),
        ({"classes": 3, "features": 12}, ("0", "1", "2")),
        ({"features": {"label": SimpleNamespace(dtype="int64")}}, ("0", "1", "2")),
    ],
)
def test_names_are_those_of_the_data_set_where_they_fit(attributes: dict[str, Any], classes: tuple[str, ...]) -> None:
    data = Named(**attributes)
    for loader in (data, DataLoader(data, batch_size=4), DataLoader(Subset(Subset(data, range(9)), range(8)))):
        assert open_loader(loader).classes == classes
    assert open_loader(data, classes=[*"abc"]).classes == ("a", "b", "c")


@pytest.mark.parametrize("own", [("cat", "eel"), ("eel", "dog", "cat"), ("cat", "dog", "eel")])
def test_labels_go_by_the_names_of_a_data_set(own: tuple[str, ...]) -> None:
    labels = torch.arange(len(LABELS)) % len(own)
    opened = open_loader(DataLoader(Named(tensors=(INPUTS, labels), classes=[*own])), classes=ANIMALS)
    assert opened.classes == tuple(ANIMALS)
    assert [ANIMALS[label] for label in opened.labels] == [own[label] for label in labels]


def test_labels_go_by_the_names_of_all_parts_of_a_data_set() -> None:
    own = ("eel", "dog", "cat")
    part, fewer = Named(classes=[*own]), Named(classes=[*own[:2]], tensors=(INPUTS[:4], torch.arange(4) % 2))
    for data in (ConcatDataset([Subset(ConcatDataset([part]), range(9)), fewer]), ConcatDataset([fewer, part])):
        opened = open_loader(DataLoader(data, batch_size=2), classes=ANIMALS)
        assert [ANIMALS[label] for label in opened.labels] == [own[data[at][1]] for at in range(len(data))]
        assert open_loader(data).classes == own
    assert open_loader(ConcatDataset([part, PAIRS])).classes == ("0", "1", "2")


@pytest.mark.parametrize("classes", [ANIMALS, None])
def test_parts_of_a_data_set_that_name_a_label_differently_are_refused(classes: list[str] | None) -> None:
    data = ConcatDataset([Named(classes=["cat", "eel"]), Named(classes=ANIMALS)])
    with pytest.raises(DataError, match=r"images: .* label 1 in the ConcatDataset, got 'eel' and 'dog'; give"):
        open_loader(DataLoader(data), classes=classes)
    assert len(open_loader(data, target="age")) == len(data)


def test_a_class_of_its_own_gives_others_another_label() -> None:
    said = r"images: expected label 1 for class 'dog', its data set gives 2 and has a class 'cow', .* none of cat, "
    with pytest.raises(DataError, match=said):
        open_loader(DataLoader(Named(classes=["cat", "cow", "dog"])), classes=ANIMALS)


@pytest.mark.parametrize("classes", ["abc", ["a", "", "b"], ["a", "a", "b"], {"a": 0, "b": 2}, []])
def test_classes_that_are_no_names_are_refused_before_images_are_read(classes: Any) -> None:
    def unread() -> Iterator[Any]:
        raise AssertionError
        yield

    with pytest.raises(UsageError, match="classes"):
        open_loader(unread(), classes=classes)


def test_a_label_without_a_name_ends_the_reading() -> None:
    def batches() -> Iterator[Any]:
        yield INPUTS, LABELS
        raise AssertionError

    with pytest.raises(DataError, match="0…1"):
        open_loader(batches(), classes=["a", "b"])


def test_what_does_not_fit_is_refused_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    class Counted(Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1000

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            read.append(index)
            return INPUTS[0], 0

    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=999 * 2 * INPUTS[0].nbytes))
    with pytest.raises(UsageError, match=r"images takes .* GiB on the disk"):
        open_loader(DataLoader(Counted(), batch_size=10))
    assert len(read) < 100


def test_errors_of_a_data_set_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "no.png").write_text("no image")

    def examples() -> Iterator[Any]:
        yield Image.open(tmp_path / "no.png"), 0

    with pytest.raises(OSError, match="cannot identify image file"):
        open_loader(examples(), preprocess=PRESETS["mnist"])


def test_inputs_that_no_pixel_gives_are_warned_about() -> None:
    with pytest.warns(LoaderWarning, match="give the mean and std of the loader's transform"):
        open_loader([(INPUTS * 255, LABELS)], mean=(0.5,) * 3, std=(0.5,) * 3)


def test_mean_and_std_make_a_preprocess_of_the_inputs_size() -> None:
    stated = LoaderDescription(mean=(0.1, 0.2, 0.3), std=torch.tensor([0.5, 0.6, 0.7]))
    found = stated.preprocess_of((3, 4, 5), [0.0], [1.0])
    assert (found.mode, found.shape, found.resize, found.mean) == ("RGB", (3, 4, 5), None, (0.1, 0.2, 0.3))
    assert found.std == pytest.approx((0.5, 0.6, 0.7)) and found.is_known
    grey = LoaderDescription(mean=0.1307, std=0.3081).preprocess_of((1, 28, 28), [0.0], [1.0])
    assert grey == PRESETS["mnist"]


def test_a_preprocess_is_taken_where_the_size_is_its_own() -> None:
    said = LoaderDescription(PRESETS["mnist"])
    assert said.preprocess_of((1, 28, 28), [0.0], [1.0]) is PRESETS["mnist"]
    with pytest.raises(UsageError, match=r"shape \(1, 28, 28\), got \(1, 32, 32\)"):
        said.preprocess_of((1, 32, 32), [0.0], [1.0])


@given(st.lists(st.tuples(st.floats(-100, 100), st.floats(1, 100)), min_size=3, max_size=3))
def test_the_range_of_the_inputs_is_taken_for_black_to_white(ranges: list[tuple[float, float]]) -> None:
    low, high = [bottom for bottom, _ in ranges], [bottom + wide for bottom, wide in ranges]
    observed = LoaderDescription().preprocess_of((3, 1, 2), low, high)
    ends = torch.tensor([low, high]).T[None, :, None, :]
    assert observed.to_pixels(ends)[0, :, 0].tolist() == [[0, 255]] * 3
    torch.testing.assert_close(observed.standardise(observed.to_pixels(ends)), ends, atol=1e-4, rtol=1e-4)


def test_an_observed_preprocess_is_no_known_one() -> None:
    observed = LoaderDescription().preprocess_of((1, 2, 2), [0.5], [0.5])  # A constant channel.
    assert isinstance(observed, ObservedPreprocess) and not observed.is_known
    assert replace(observed) == observed and "inputs from a loader" in str(observed)
    known = PRESETS["mnist"]
    assert ObservedPreprocess(**vars(known)) != known


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([], "gave no images"),
        ([INPUTS], "batch 0: .*put a single batch into a list"),
        ([{"pixels": INPUTS, "y": LABELS}], "pixel_values, .* got pixels, y"),
        ([(INPUTS, LABELS[:9])], "a label for each of 10 images, got 9"),
        ([(INPUTS, ["cat"] * 10)], "classes="),
        ([(INPUTS, torch.eye(10))], r"argmax\(1\)"),
        ([(INPUTS[:, :2], LABELS)], "1 or 3 channels"),
        ([(INPUTS[:, 0], LABELS)], r"images\[:, None\]"),
        ([(INPUTS * torch.inf, LABELS)], "finite inputs"),
        ([(INPUTS, LABELS), (INPUTS[..., :2], LABELS)], "batch 1 has "),
        ([(INPUTS, LABELS), (INPUTS, torch.stack([LABELS] * 2, 1))], "the same number of labels"),
        ([([*INPUTS[:9], INPUTS[9, :, :2]], LABELS)], "inputs of one shape"),
        ([(INPUTS, LABELS - 1)], "labels in 0…1, got -1…1"),
        ([(INPUTS, LABELS + 10**12)], "got 1000000000002"),
    ],
)
def test_batches_that_cannot_be_used(data: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_loader(data)


@pytest.mark.parametrize(
    ("data", "instead"),
    [
        *((each, "expected a DataLoader, a data set of") for each in (3, INPUTS, {"train": PAIRS}, object())),
        ("images/train", r"open_dataset\("),
        (Path("images/train"), r"open_dataset\("),
        (DataFrame(), r"list\(zip\("),
    ],
)
def test_what_is_no_loader_is_refused_with_what_would_be(data: Any, instead: str) -> None:
    with pytest.raises(UsageError, match=instead):
        inspect.unwrap(open_loader)(data)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"unit": "years"}, "unit"),
        ({"classes": ("a", "b", "c"), "target": "age"}, "classes or a target"),
        ({"mean": 0.5}, "both mean and std"),
        ({"preprocess": PRESETS["mnist"], "mean": 0.5, "std": 0.5}, "a preprocess, or mean and std"),
        ({"mean": (0.5,) * 2, "std": (0.5,) * 2}, "expected 3 means"),
    ],
)
def test_arguments_that_cannot_act_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_loader(PAIRS, **arguments)


def test_what_the_disk_lacks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.BufferedRandom):
        def write(self, _: object) -> int:
            raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(cache.Scratch, "open", lambda _: Full(io.FileIO(tmp_path / "full", "w+")))
        with pytest.raises(UsageError, match="No space left on device; set TMPDIR"):
            open_loader(PAIRS)
    monkeypatch.setattr(
        tempfile,
        "gettempdir",
        Mock(side_effect=FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")),
    )
    with pytest.raises(UsageError, match="TMPDIR"):
        open_loader(PAIRS)
