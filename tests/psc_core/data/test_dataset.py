"""Data sets: layouts, splits, rows and the errors that name what is wrong."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.data.dataset import ImageDataset, by_class, labelled
from psc_core.data.folder import image_folder
from psc_core.data.formats import read_idx, read_tar
from psc_core.data.sources import ArraySource, FileSource
from psc_core.data.spec import open_dataset
from psc_core.data.splits import split_validation
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS, Preprocess

TINY = Preprocess("L", 2, 2, None, (0.5,), (0.5,))


def numbered(labels: torch.Tensor, classes: int = 3) -> ImageDataset:
    """Images whose pixels are their own number."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)
    return labelled("numbered", [str(c) for c in range(classes)], ArraySource(images), labels, TINY)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 50))
def test_batches_cover_every_row_once_in_order(labels: list[int], each: int, batch_images: int) -> None:
    table = torch.tensor(labels)[:, None].repeat(1, each)
    dataset = numbered(table)
    pixels, rows = [], []
    batches = list(dataset.batches(batch_images))
    assert len(batches) == dataset.batch_count(batch_images)
    for batch in batches:
        assert len(batch.images) <= batch_images
        assert len(batch.labels) == each * len(batch.images)
        pixels += batch.images[:, 0, 0, 0].tolist()
        rows += list(zip(batch.images[batch.image_index, 0, 0, 0].tolist(), batch.labels.tolist(), strict=True))
    assert pixels == list(range(len(labels)))
    assert rows == [(i, label) for i, label in enumerate(labels) for _ in range(each)]


@pytest.mark.parametrize("size", [(2, 2), (3, 3)])
def test_arrays_taken_whole_are_what_is_read_one_by_one(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, *size), dtype=np.uint8)
    dataset = labelled("noise", "ab", ArraySource(pixels), torch.arange(9) % 2, TINY).subset(torch.tensor([8, 3, 3, 0]))
    (batch,) = dataset.batches(9)
    assert np.array_equal(batch.images.numpy(), np.stack([dataset.image(i) for i in range(4)]))


@given(st.permutations(range(11)), st.integers(1, 3), st.integers(1, 12))
def test_batches_in_an_order_are_those_of_the_subset(order: list[int], each: int, batch_images: int) -> None:
    dataset = numbered(torch.arange(11 * each).view(11, each) % 3)
    positions = torch.tensor(order)
    ordered, subset = dataset.batches(batch_images, order=positions), dataset.subset(positions).batches(batch_images)
    for got, expected in zip(ordered, subset, strict=True):
        assert torch.equal(got.images, expected.images)
        assert torch.equal(got.labels, expected.labels) and torch.equal(got.image_index, expected.image_index)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_by_class_is_a_stable_order(labels: list[int]) -> None:
    assert by_class(numbered(torch.tensor(labels))).tolist() == sorted(range(len(labels)), key=labels.__getitem__)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_a_subset_keeps_images_with_their_labels(labels: list[int], random: object) -> None:
    table = torch.stack([torch.tensor(labels), torch.tensor(labels).flip(0)], 1)
    dataset = numbered(table)
    positions = torch.tensor(sorted(random.sample(range(len(labels)), random.randint(1, len(labels)))))  # type: ignore[attr-defined]
    part = dataset.subset(positions)
    for at, position in enumerate(positions.tolist()):
        assert int(part.image(at)[0, 0, 0]) == position
        assert part.labels[part.offsets[at] : part.offsets[at + 1]].tolist() == table[position].tolist()


@pytest.mark.parametrize(("name", "preset"), [("mnist", "mnist"), ("fashion-mnist", "mnist"), ("cifar10", "cifar10")])
def test_built_in_splits_are_disjoint_and_whole(data_root: Path, name: str, preset: str) -> None:
    sets = {
        split: open_dataset(f"{name}:{data_root}", split=split, preprocess=PRESETS[preset])
        for split in ("train", "val", "test")
    }
    train, val = set(sets["train"].indices.tolist()), set(sets["val"].indices.tolist())
    assert not train & val
    assert sorted(train | val) == list(range(len(sets["train"].source)))
    assert len(sets["test"].classes) == 10
    assert len({s.digest() for s in sets.values()}) == 3


def test_dirty_mnist_gives_ambiguous_images_ten_training_rows(data_root: Path) -> None:
    train = open_dataset(f"dirty-mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    assert (len(train), train.examples) == (1650 + 150, 1650 + 10 * 150)
    dirty = open_dataset(f"dirty-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    clean, ambiguous = dirty.groups["mnist"], dirty.groups["ambiguous-mnist"]
    assert (len(clean), len(ambiguous), dirty.examples) == (800, 300, 1100)
    raw = read_idx(data_root / "AmbiguousMNIST/raw/t10k-images-idx3-ubyte")
    assert np.array_equal(dirty.image(int(ambiguous[7]))[0], raw[7])


def test_the_split_can_be_named_in_the_spec(data_root: Path) -> None:
    chosen = open_dataset(f"mnist:{data_root}#test", split="train", preprocess=PRESETS["mnist"])
    assert len(chosen) == 800
    with pytest.raises(DataError, match="expected a split"):
        open_dataset(f"mnist:{data_root}#exam", split="train", preprocess=PRESETS["mnist"])


def test_validation_halves_are_disjoint_and_repeatable(data_root: Path) -> None:
    val = open_dataset(f"dirty-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    choose, calibrate = split_validation(val, seed=3)
    assert sorted(choose.indices.tolist() + calibrate.indices.tolist()) == sorted(val.indices.tolist())
    assert torch.equal(split_validation(val, seed=3)[1].indices, calibrate.indices)
    assert sum(len(group) for group in choose.groups.values()) == len(choose)


def test_the_groups_of_a_half_are_its_own_images_of_those_groups(data_root: Path) -> None:
    val = open_dataset(f"dirty-mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    choose, _ = split_validation(val, seed=3)
    assert choose.groups.keys() == val.groups.keys()
    for name, group in choose.groups.items():
        assert len(group)
        assert set(choose.indices[group].tolist()) <= set(val.indices[val.groups[name]].tolist())


def test_another_seed_gives_other_halves(data_root: Path) -> None:
    val = open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    one, other = (split_validation(val, seed=seed)[0] for seed in (3, 4))
    assert not torch.equal(one.indices, other.indices)


def write_folder(root: Path, counts: dict[str, int]) -> Path:
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("L", (3, 3), i).save(root / name / f"{i}.png")
    return root


def test_image_folder_reads_classes_in_name_order(tmp_path: Path) -> None:
    dataset = image_folder(write_folder(tmp_path, {"dog": 2, "cat": 3}), TINY)
    assert dataset.classes == ("cat", "dog")
    assert dataset.first_labels().tolist() == [0, 0, 0, 1, 1]
    assert isinstance(dataset.source, FileSource)
    assert [dataset.source.path(i).parent.name for i in range(5)] == ["cat"] * 3 + ["dog"] * 2
    assert dataset.source.names.nbytes <= 5 * 20, "a few bytes an image, however long the folder's own path"


def test_an_empty_class_folder_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {f"c{i:02d}": 0 if i == 16 else 1 for i in range(20)})
    with pytest.raises(DataError, match=r"class folder 17 of 20, .*c16, has no images"):
        image_folder(root, TINY)


@pytest.mark.parametrize("split", ["val", "test"])
def test_a_class_may_lack_validation_and_test_images(tmp_path: Path, split: str) -> None:
    """Its empty folder still says that it is one of the classes."""
    root = write_folder(tmp_path, {"a": 2, "b": 0, "c": 1})
    dataset = open_dataset(str(root), split=split, preprocess=TINY)
    assert (dataset.classes, dataset.first_labels().tolist()) == (("a", "b", "c"), [0, 0, 2])
    assert sum(len(batch.images) for batch in dataset.batches(2)) == 3
    with pytest.raises(DataError, match=r"class folder 2 of 3, .*b, has no images"):
        open_dataset(str(root), split="train", preprocess=TINY)


def test_folders_without_any_image_are_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 0, "b": 0})
    for labelled_images in (True, False):
        with pytest.raises(DataError, match=r"expected images .* it has none"):
            open_dataset(str(root), split="test", preprocess=TINY, labelled_images=labelled_images)


def test_folders_that_are_not_there_or_flat(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is not one"):
        image_folder(tmp_path / "none", TINY)
    Image.new("L", (3, 3)).save(tmp_path / "a.png")
    with pytest.raises(DataError, match="one folder a class"):
        image_folder(tmp_path, TINY)
    assert len(image_folder(tmp_path, TINY, labelled_images=False)) == 1
    write_folder(tmp_path, {"more": 2})
    assert len(image_folder(tmp_path, TINY, labelled_images=False)) == 3


def test_a_directory_may_have_a_number_sign(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "set#val", {"a": 1, "b": 1})
    assert len(open_dataset(str(root), split="train", preprocess=TINY)) == 2
    assert len(open_dataset(f"{root}#val", split="train", preprocess=TINY)) == 2


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    (root / "b" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"b.0\.png: expected one of JPEG"):
        list(image_folder(root, TINY).batches(10))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    (root / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    folder = image_folder(root, TINY)
    for use in (lambda: list(folder.batches(10)), folder.digest):
        with pytest.raises(DataError, match=r"gone\.png.*repair or remove"):
            use()


def test_file_names_of_any_bytes(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    source = root / "b" / "0.png"
    (root / "b" / os.fsdecode(b"caf\xe9.png")).write_bytes(source.read_bytes())
    folder = image_folder(root, TINY)
    assert sum(len(batch.images) for batch in folder.batches(10)) == 3
    assert folder.digest()


def test_class_names_are_utf_8(tmp_path: Path) -> None:
    root = write_folder(tmp_path / os.fsdecode(b"caf\xe9"), {"a": 1, os.fsdecode(b"chien\xe9"): 1})
    with pytest.raises(DataError, match=r"UTF-8, .* 'chien\\udce9'; rename it"):
        image_folder(root, TINY)
    assert len(image_folder(root, TINY, labelled_images=False)) == 2


@pytest.mark.parametrize("spec", [".x:make", "..x.y:make", ":make"])
def test_paths_are_no_factories(spec: str) -> None:
    with pytest.raises(DataError, match=r"expected package\.module:factory, not a path"):
        open_dataset(spec, split="train", preprocess=TINY)


@pytest.mark.parametrize("spec", ["nowhere.module:make", "psc_core.data.spec:nothing"])
def test_unknown_factories_are_refused(spec: str) -> None:
    with pytest.raises(DataError, match="cannot be imported"):
        open_dataset(spec, split="train", preprocess=TINY)


def test_labels_out_of_range_are_refused() -> None:
    with pytest.raises(DataError, match=r"expected labels in 0…2, got 0…3"):
        numbered(torch.tensor([0, 3]))


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x08", b"\x00\x00\x09\x01\x00\x00\x00\x01\x00", b"\x00\x00\x08\x01\x00\x00\x00\x05\x01"]
)
def test_a_damaged_idx_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="x: expected"):
        read_idx(tmp_path / "x")


def test_a_truncated_gzip_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05hello")[:-9])
    with pytest.raises(DataError, match="expected an IDX file"):
        read_idx(tmp_path / "x")


def test_an_archive_without_images_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tar archive"):
        read_tar(tmp_path / "none.tar.gz", "x/")
