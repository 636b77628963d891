from __future__ import annotations

import base64
import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from psc_core.data.dataset import ArraySource, ImageDataset, label_images
from psc_core.errors import BundleError, UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.stored_images import MAX_COUNT, SIDE, StoredImages, check_count, choose_images, shrink
from tests.reference import stored_images as naive

MODEL: dict[str, Any] = {"components": 2, "channels": 3, "classes": 3, "has_values": False}


def tensors(count: int = 4, components: int = 2, *, size: int = 8, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "embedding": torch.randn(count, components, generator=generator),
        "pixels": torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator),
        "images": torch.arange(count) * 10,
        "labels": torch.arange(count) % 3,
    }


@given(st.integers(0, 3), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_matches_the_twin(images: int, count: int, components: int, seed: int) -> None:
    kept = StoredImages(tensors(count, components, seed=seed))
    coordinates = torch.randn(images, components, generator=torch.Generator().manual_seed(seed + 1)).double()
    expected = naive.distances(coordinates.tolist(), kept.embedding.tolist())
    np.testing.assert_allclose(kept(coordinates), np.reshape(expected, (images, count)), rtol=1e-4, atol=1e-5)
    ordinary = naive.ordinary(kept.embedding.tolist())
    assert kept.ordinary == (None if ordinary is None else pytest.approx(ordinary, rel=1e-3, abs=1e-3))


def test_small_differences_of_large_coordinates_are_resolved() -> None:
    kept = {**tensors(2), "embedding": torch.tensor([[1000.0, 0.0], [1000.0, 0.5]])}
    assert StoredImages(kept)(torch.tensor([[1000.0, 0.125]])).tolist() == [[0.125, 0.375]]


@pytest.mark.parametrize(
    ("likely", "shown"),
    [
        ([], [5, 3, 1]), ([2], [5, 2, 8]), ([0, 1], [3, 1, 0, 5]), ([1, 0], [1, 3, 4, 5]), ([2, 0], [5, 3, 2]),
        ([0, 1, 2], [3, 1, 5]),
    ],
)  # fmt: skip
def test_images_of_the_likely_classes_come_first(likely: list[int], shown: list[int]) -> None:
    kept = StoredImages({**tensors(9), "embedding": torch.eye(9, 2)})  # Image i has class i % 3.
    distances = np.array([5.0, 3.0, 4.0, 2.0, 6.0, 1.0, 9.0, 8.0, 7.0])
    assert [each["image"] // 10 for each in kept.documents(distances, ("a", "b", "c"), likely)] == shown


def test_a_document_shows_the_kept_image() -> None:
    kept = StoredImages({**tensors(), "embedding": torch.tensor([[0.0, 0], [2, 0], [0, 2], [9, 0]])})
    first, second, _ = kept.documents(np.array([1.5, 9, 0.5, 9], np.float32), ("a", "b", "c"))
    picture = base64.b64decode(second.pop("png"))
    assert first.keys() - second.keys() == {"png"}
    assert second == {"image": 0, "label": "a", "distance": 1.5, "relative_distance": 0.75}
    assert (first["image"], first["label"], first["distance"]) == (20, "c", 0.5)
    with Image.open(io.BytesIO(picture)) as opened:
        assert np.array_equal(np.asarray(opened).transpose(2, 0, 1), tensors()["pixels"][0].numpy())


def test_a_number_stands_beside_its_bin() -> None:
    kept = StoredImages({**tensors(), "values": torch.linspace(0, 3, 4, dtype=torch.float64)})
    document, *_ = kept.documents(np.array([3.0, 2, 1, 0]), ("low", "middle", "high"))
    assert (document["label"], document["value"]) == ("low", 3.0)


def test_pictures_stay_on_the_host() -> None:
    kept = copy.deepcopy(StoredImages(tensors())).to("meta")
    assert kept.embedding.device.type == "meta" and kept.tensors()["pixels"].device.type == "cpu"
    assert {name for name, _ in kept.named_buffers()} == {"embedding"}


def test_restores_what_was_kept() -> None:
    kept = StoredImages(tensors())
    again = StoredImages.restore(kept.sizes, kept.tensors(), **MODEL)
    assert len(again) == 4 and again.sizes == kept.sizes
    assert all(torch.equal(again.tensors()[name], tensor) for name, tensor in kept.tensors().items())


@pytest.mark.parametrize(
    ("sizes", "model", "changes", "message"),
    [
        ({"count": 5}, {}, {}, "'count': 5"),
        ({"height": 9}, {}, {}, "'height': 9"),
        ({}, {"components": 3}, {}, "3 components"),
        ({}, {"channels": 1}, {}, "1 channels"),
        ({}, {"classes": 2}, {}, "labels from 0 to 1"),
        ({}, {"has_values": True}, {}, "'values'"),
        ({}, {}, {"labels": torch.tensor([0, 1, 2, -1])}, "labels from 0 to 2"),
        ({}, {}, {"images": torch.tensor([0, 1, 2, -1])}, "positions from 0"),
        ({}, {}, {"labels": torch.arange(3)}, r"stored_images\.labels"),
        ({}, {}, {"pixels": torch.zeros(4, 3, 8, 8)}, r"stored_images\.pixels"),
        ({}, {}, {"pixels": torch.zeros(4, 3, SIDE + 1, 8, dtype=torch.uint8)}, f"at most {SIDE}"),
        ({}, {}, {"pixels": torch.zeros(4, 2, 8, 8, dtype=torch.uint8)}, "1 or 3 channels"),
        ({}, {}, {"pixels": torch.zeros(4, 3, 0, 8, dtype=torch.uint8)}, r"stored_images\.pixels"),
    ],
)
def test_refuses_what_does_not_belong_together(
    sizes: dict[str, int], model: dict[str, Any], changes: dict[str, torch.Tensor], message: str
) -> None:
    changed = {**tensors(), **changes}
    count, channels, height, width = changed["pixels"].shape
    config = {"count": count, "kept": 2, "channels": channels, "height": height, "width": width, **sizes}
    with pytest.raises(BundleError, match=message):
        StoredImages.restore(config, changed, **{**MODEL, **model})


def test_refuses_more_than_so_many() -> None:
    with pytest.raises(BundleError, match=f"at most {MAX_COUNT} stored images"):
        StoredImages(tensors(MAX_COUNT + 1, size=1))


def dataset(labels: torch.Tensor) -> ImageDataset:
    source = ArraySource(np.zeros((len(labels), 28, 28), np.uint8))
    return label_images("toy", [f"class {k}" for k in range(int(labels.max()) + 1)], source, labels, PRESETS["mnist"])


@given(st.lists(st.integers(1, 9), min_size=2, max_size=5), st.integers(2, 60), st.integers(0, 9))
def test_every_class_is_covered(sizes: list[int], count: int, seed: int) -> None:
    labels = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    count = max(count, len(sizes))
    kept = choose_images(dataset(labels), count, seed)
    assert len(kept) == min(count, len(labels)) == len(kept.unique())
    of_class = labels[kept].bincount(minlength=len(sizes)).tolist()
    assert min(of_class) >= 1
    least = min(got for got, size in zip(of_class, sizes, strict=True) if got < size) if count < len(labels) else 0
    assert all(got <= least + 1 for got in of_class) or count >= len(labels)
    assert torch.equal(kept, choose_images(dataset(labels), count, seed))


def test_images_of_several_labels_are_kept_only_where_a_class_has_no_others() -> None:
    labels = torch.tensor([[0, 0], [0, 1], [0, 0], [1, 0], [1, 2], [2, 2]])  # All of class 1 have another label too.
    kept = choose_images(dataset(labels), 6, 0)
    assert kept.tolist() == [0, 2, 3, 4, 5]


@pytest.mark.parametrize("count", [9, MAX_COUNT + 1])
def test_a_number_that_does_not_cover_the_classes_is_refused(count: int) -> None:
    with pytest.raises(UsageError, match=f"from 10, one training image of each class, to {MAX_COUNT}, got {count}"):
        check_count(count, 10)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((28, 28), (28, 28)), ((224, 224), (64, 64)), ((64, 128), (32, 64)), ((480, 2), (64, 1)), ((65, 64), (64, 63))],
)
def test_stored_images_keep_the_sides_in_proportion(size: tuple[int, int], expected: tuple[int, int]) -> None:
    images = torch.full((2, 3, *size), 77, dtype=torch.uint8)
    small = shrink(images)
    assert small.shape == (2, 3, *expected) and max(expected) <= SIDE
    assert small.dtype == torch.uint8 and bool((small == 77).all())
