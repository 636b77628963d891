"""Which training images are kept, and how small."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.thumbnails import MAX_COUNT, SIDE, check_thumbnail_count, kept_images, thumbnails_of


def dataset(labels: torch.Tensor) -> ImageDataset:
    source = ArraySource(np.zeros((len(labels), 28, 28), np.uint8))
    return labelled("toy", [f"class {k}" for k in range(int(labels.max()) + 1)], source, labels, PRESETS["mnist"])


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(2, 60), st.integers(0, 9))
def test_every_class_is_covered(sizes: list[int], count: int, seed: int) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    count = max(count, len(sizes))
    kept = kept_images(dataset(labels), count, seed)
    assert len(kept) == min(count, len(labels)) == len(kept.unique())
    of_class = labels[kept].bincount(minlength=len(sizes)).tolist()
    assert min(of_class) >= 1
    least = min(got for got, size in zip(of_class, sizes, strict=True) if got < size) if count < len(labels) else 0
    assert all(got <= least + 1 for got in of_class) or count >= len(labels)
    assert torch.equal(kept, kept_images(dataset(labels), count, seed))


def test_images_of_several_labels_are_kept_only_where_a_class_has_no_others() -> None:
    labels = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [1, 2], [2, 2]])  # All of class 1 have another label too.
    kept = kept_images(dataset(labels), 6, 0)
    assert kept.tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [9, MAX_COUNT + 1])
def test_a_number_that_does_not_cover_the_classes_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"from 10, one training image of each class, to {MAX_COUNT}, got {count}"):
        check_thumbnail_count(count, 10)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((28, 28), (28, 28)), ((224, 224), (64, 64)), ((64, 128), (32, 64)), ((480, 2), (64, 1)), ((65, 64), (64, 63))],
)
def test_thumbnails_keep_the_sides_in_proportion(size: tuple[int, int], expected: tuple[int, int]) -> None:
    images = torch.full((2, 3, *size), 77, dtype=torch.uint8)
    small = thumbnails_of(images)
    assert small.shape == (2, 3, *expected) and max(expected) <= SIDE
    assert small.dtype == torch.uint8 and bool((small == 77).all())
