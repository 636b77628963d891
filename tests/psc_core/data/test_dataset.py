from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.answers import Target
from psc_core.data.dataset import (
    ArraySource,
    ImageDataset,
    draw_balanced,
    label_images,
    number_images,
    split_validation,
    stable_order,
)
from psc_core.data.open import image_folder
from psc_core.errors import DataError
from tests.opened import opened
from tests.psc_core.data.support import TINY, write_folder


def numbered(labels: torch.Tensor, classes: int = 3) -> ImageDataset:
    """Images whose pixels are their own number."""
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)
    return label_images("numbered", [str(c) for c in range(classes)], ArraySource(images), labels, TINY)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 50))
def test_batches_cover_every_example_once_in_order(labels: list[int], each: int, batch_images: int) -> None:
    table = torch.tensor(labels)[:, None].repeat(1, each)
    dataset = numbered(table)
    pixels, examples = [], []
    batches = list(dataset.batches(batch_images))
    assert len(batches) == -(-len(dataset) // batch_images)
    for batch in batches:
        assert len(batch.images) <= batch_images
        assert len(batch.labels) == each * len(batch.images)
        pixels += batch.images[:, 0, 0, 0].tolist()
        examples += list(zip(batch.images[batch.image_index, 0, 0, 0].tolist(), batch.labels.tolist(), strict=True))
    assert pixels == list(range(len(labels)))
    assert examples == [(i, label) for i, label in enumerate(labels) for _ in range(each)]


@given(st.permutations(range(11)), st.integers(1, 3), st.integers(1, 12))
def test_ordered_batches_equal_subset(order: list[int], each: int, batch_images: int) -> None:
    dataset = numbered(torch.arange(11 * each).view(11, each) % 3)
    positions = torch.tensor(order)
    ordered, subset = dataset.batches(batch_images, order=positions), dataset.subset(positions).batches(batch_images)
    for got, expected in zip(ordered, subset, strict=True):
        assert torch.equal(got.images, expected.images)
        assert torch.equal(got.labels, expected.labels) and torch.equal(got.image_index, expected.image_index)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20))
def test_stable_order(labels: list[int]) -> None:
    assert stable_order(torch.tensor(labels)).tolist() == sorted(range(len(labels)), key=labels.__getitem__)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=20), st.randoms(use_true_random=False))
def test_subset_keeps_labels_with_images(labels: list[int], random: object) -> None:
    table = torch.stack([torch.tensor(labels), torch.tensor(labels).flip(0)], 1)
    dataset = numbered(table)
    positions = torch.tensor(sorted(random.sample(range(len(labels)), random.randint(1, len(labels)))))  # type: ignore[attr-defined]
    part = dataset.subset(positions)
    for at, position in enumerate(positions.tolist()):
        assert int(part.image(at)[0, 0, 0]) == position
        assert part.labels[part.offsets[at] : part.offsets[at + 1]].tolist() == table[position].tolist()


def test_rejects_labels_out_of_range() -> None:
    with pytest.raises(DataError, match=r"expected labels in 0…2, got 0…3"):
        numbered(torch.tensor([0, 3]))


def test_halves_are_disjoint_and_reproducible() -> None:
    val = opened("dirty-mnist", "val")
    choose, calibrate = split_validation(val, seed=3)
    assert sorted(choose.indices.tolist() + calibrate.indices.tolist()) == sorted(val.indices.tolist())
    assert torch.equal(split_validation(val, seed=3)[1].indices, calibrate.indices)
    assert not torch.equal(split_validation(val, seed=4)[1].indices, calibrate.indices)
    assert sum(len(group) for group in choose.groups.values()) == len(choose)
    for name, group in choose.groups.items():
        assert len(group) and set(choose.indices[group].tolist()) <= set(val.indices[val.groups[name]].tolist())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 50), st.integers(0, 3))
def test_balanced_takes_as_many_of_each_class_as_there_are(labels: list[int], count: int, seed: int) -> None:
    images = np.arange(len(labels), dtype=np.uint8)[:, None, None].repeat(2, 1).repeat(2, 2)
    data = label_images("tiny", "abcd", ArraySource(images), torch.tensor(labels), TINY)
    chosen = draw_balanced(data, count, seed)
    assert len(chosen) == min(count, len(labels))
    assert chosen.indices.tolist() == sorted(set(chosen.indices.tolist()))
    assert chosen.first_labels().tolist() == [labels[i] for i in chosen.indices.tolist()]
    taken = [chosen.first_labels().tolist().count(k) for k in range(4)]
    left = [labels.count(k) > taken[k] for k in range(4)]
    assert all(taken[k] >= max(taken) - 1 for k in range(4) if left[k])
    assert draw_balanced(data, None) is data and torch.equal(draw_balanced(data, count, seed).indices, chosen.indices)


def test_images_are_ambiguous_where_their_labels_differ() -> None:
    once = numbered(torch.tensor([0, 1, 2, 1]))
    twice = replace(once, labels=once.labels.repeat_interleave(2), offsets=2 * once.offsets)
    assert not once.is_ambiguous and not twice.is_ambiguous
    assert replace(twice, labels=twice.labels.roll(1)).is_ambiguous


@pytest.mark.parametrize("size", [(2, 2), (3, 3)])
def test_array_shortcut_equals_reading_one_by_one(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, *size), dtype=np.uint8)
    dataset = label_images("noise", "ab", ArraySource(pixels), torch.arange(9) % 2, TINY).subset(
        torch.tensor([8, 3, 3, 0])
    )
    (batch,) = dataset.batches(9)
    assert np.array_equal(batch.images.numpy(), np.stack([dataset.image(i) for i in range(4)]))


def test_file_names_may_be_any_bytes(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    source = root / "b" / "0.png"
    (root / "b" / os.fsdecode(b"caf\xe9.png")).write_bytes(source.read_bytes())
    folder = image_folder(root, TINY)
    assert sum(len(batch.images) for batch in folder.batches(10)) == 3
    assert folder.digest()


AGE = Target(name="age", unit="years")


def numbers(values: list[float]) -> ImageDataset:
    source = ArraySource(np.zeros((len(values), 3, 3), np.uint8))
    return number_images("some", AGE, source, torch.tensor(values, dtype=torch.float64), TINY)


def test_subset_and_batches_keep_the_numbers() -> None:
    data = numbers([3.0, 1.0, 2.0]).subset(torch.tensor([2, 0]))
    (batch,) = data.batches(5)
    assert batch.values is not None and batch.values.tolist() == [2.0, 3.0]
    assert data.digest() != numbers([2.0, 3.5]).digest() and data.digest() == numbers([2.0, 3.0]).digest()


@pytest.mark.parametrize(
    ("values", "said"), [([1.0, float("nan")], "finite numbers of age, got 1 .* first of image 1"), ([], "at least")]
)
def test_unusable_numbers_are_refused(values: list[float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        numbers(values)


def test_rotated_digits_are_digits_turned_by_their_angle() -> None:
    turned, plain = (opened(name) for name in ("rotated-mnist", "mnist"))
    again = opened("rotated-mnist")
    assert turned.values is not None and again.values is not None and torch.equal(turned.values, again.values)
    assert float(turned.values.abs().max()) <= 60 and float(turned.values.std()) > 30
    for index in range(20):
        back = Image.fromarray(turned.image(index)[0]).rotate(-float(turned.values[index]), Image.Resampling.BILINEAR)
        difference = np.abs(np.asarray(back, float) - plain.image(index)[0]).mean()
        wrong = np.abs(turned.image(index)[0].astype(float) - plain.image(index)[0]).mean()
        assert difference < max(12.0, wrong / 2)


def test_names_a_damaged_or_an_absent_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    (root / "b" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"b.0\.png: "):
        list(image_folder(root, TINY).batches(10))
    (root / "b" / "0.png").unlink()
    (root / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    folder = image_folder(root, TINY)
    with pytest.raises(DataError, match=r"gone\.png"):
        list(folder.batches(10))
    assert len(folder.digest()) == 64, "a fit names, counts and leaves out such an image"
