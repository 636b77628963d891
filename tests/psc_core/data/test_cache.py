import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core.compute import Compute
from psc_core.data import cache
from psc_core.data.cache import (
    CachedSource,
    Scratch,
    cache_images,
    find_unreadable,
    map_file,
    pixel_bytes,
    readable,
    shared_images,
    unused_levels,
    without,
)
from psc_core.data.dataset import (
    ArraySource,
    EncodedSource,
    FileSource,
    ImageDataset,
    TensorSource,
    label_images,
    split_validation,
)
from psc_core.data.open import image_folder, open_dataset
from psc_core.errors import DataError, UsageError
from psc_core.images.preprocess import PRESETS, Preprocess
from tests.encoded import encode
from tests.opened import opened
from tests.psc_core.data.support import TINY, write_folder
from tests.psc_core.images.support import GRADIENT, tiff_of

PREPROCESS = replace(PRESETS["cifar10"], height=8, width=8)


@pytest.fixture
def folder(tmp_path: Path) -> ImageDataset:
    noise = np.random.default_rng(0)
    for index in range(10):
        file = tmp_path / "images" / f"class{index % 2}" / f"{index}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(noise.integers(0, 256, (12, 9, 3)).astype(np.uint8)).save(file)
    return open_dataset(str(tmp_path / "images"), split="train", preprocess=PREPROCESS)


def pixels(data: ImageDataset) -> torch.Tensor:
    return torch.cat([batch.images for batch in data.batches(4)])


def test_decodes_once_for_all_passes_and_parts(folder: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Counter[int]()
    decode = FileSource.read

    def counted(source: FileSource, index: int, preprocess: object) -> object:
        reads[index] += 1
        return decode(source, index, preprocess)  # type: ignore[arg-type]

    expected = pixels(folder)
    monkeypatch.setattr(FileSource, "read", counted)
    kept = cache_images(folder)
    first, second = split_validation(kept)
    for data, wanted in ((kept, expected), (kept, expected), (first, pixels(first)), (second, pixels(second))):
        assert torch.equal(pixels(data), wanted)
    assert set(reads.values()) == {1} and len(reads) == len(folder)
    assert kept.digest() == folder.digest()
    other = replace(kept, preprocess=replace(PREPROCESS, height=4, width=4))
    assert pixels(other).shape == (10, 3, 4, 4)


def test_an_array_is_of_zeros_and_outlives_its_file(tmp_path: Path) -> None:
    found = Scratch(tmp_path).array((3, 2), np.float32)
    assert list(tmp_path.iterdir()) == [] and not found.any()
    found[1:] = 7
    assert found.sum() == 28
    with Scratch(tmp_path).open() as file:
        file.write(bytes([1, 2]))
        assert map_file(file, (2, 2), np.uint8).tolist() == [[1, 2], [0, 0]]


def test_takes_the_space_of_the_images_that_are_read(folder: ImageDataset) -> None:
    few = folder.subset(torch.tensor([7, 2, 5]))
    kept = cache_images(few)
    assert isinstance(kept.source, CachedSource) and kept.source.pixels.shape == (3, *PREPROCESS.shape)
    assert torch.equal(pixels(kept), pixels(few)) and torch.equal(pixels(kept), pixels(folder)[[7, 2, 5]])
    assert kept.digest() == few.digest() and len(kept.source) == 3
    times = [few.source.modified_ns(index) for index in (7, 2, 5)]
    assert [kept.source.modified_ns(index) for index in range(3)] == times and min(times) > 0


def test_space_is_needed_once_for_what_is_decoded(folder: ImageDataset) -> None:
    size = len(folder) * 3 * 8 * 8
    kept, two = cache_images(folder), folder.subset(torch.arange(2))
    assert pixel_bytes(folder) == size and pixel_bytes(kept) == 0 and cache_images(kept) is kept
    assert pixel_bytes(replace(kept, preprocess=replace(PREPROCESS, height=4))) == size // 2
    assert Scratch(processes=3).size(folder, kept, two) == 3 * (size + size // 5)


def test_takes_half_of_the_free_space(folder: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = len(folder) * 3 * 8 * 8
    for free, processes, fits in ((4 * size, 1, True), (4 * size - 1, 1, False), (4 * size, 2, False)):
        monkeypatch.setattr(cache.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        assert Scratch(processes=processes).has_room(folder, folder) == fits
    monkeypatch.undo()
    with pytest.raises(UsageError, match="No such file or directory; choose another --cache or off"):
        Scratch(tmp_path / "nowhere").has_room(folder)


def test_a_full_disk_is_an_error_only_where_the_folder_was_asked_for(
    folder: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache.os, "posix_fallocate", Mock(side_effect=OSError(28, "No space left on device")))
    assert cache_images(folder) is folder
    with pytest.raises(UsageError, match="No space left on device; choose another --cache or off"):
        cache_images(folder, tmp_path)
    with pytest.raises(UsageError, match="No such file or directory"):
        cache_images(folder, tmp_path / "nowhere")


def test_arrays_of_the_right_size_are_read_as_they_are() -> None:
    digits = opened("mnist", "train")
    assert cache_images(digits) is digits and pixel_bytes(digits) == 0


@pytest.fixture
def folder_readable(tmp_path: Path) -> ImageDataset:
    """Ten images a class; of each the third is empty, the fourth text, the last cut off."""
    root = write_folder(tmp_path / "images", {"a": 10, "b": 10})
    for name in "ab":
        whole = (root / name / "9.png").read_bytes()
        for file, content in (("2", b""), ("3", b"text"), ("9", whole[: len(whole) // 2])):
            (root / name / f"{file}.png").write_bytes(content)
    return image_folder(root, TINY)


BAD = [2, 3, 9, 12, 13, 19]


def test_finds_and_names_them(folder_readable: ImageDataset) -> None:
    found = find_unreadable(folder_readable, 10)
    assert found.positions.tolist() == BAD and len(found) == len(BAD)
    assert len(found.reasons) == cache.SHOWN_IMAGES
    assert "a/2.png: expected one of JPEG" in found.reasons[0] and "a/9.png: " in found.reasons[2]
    kept = without(folder_readable, found)
    assert len(kept) == 14 and kept.first_labels().tolist() == [0] * 7 + [1] * 7
    assert sum(len(batch.images) for batch in kept.batches(4)) == 14
    assert len(find_unreadable(kept, 1)) == 0 and without(kept, find_unreadable(kept, 1)) is kept


def test_ends_early_where_there_are_more(folder_readable: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "_AT_ONCE", 5)
    assert find_unreadable(folder_readable, 1).positions.tolist() == BAD[:2]
    with pytest.raises(DataError, match=r"at most 1 images .* found more: .*a/2\.png.*3\.png.*by --max-bad-images"):
        readable([folder_readable], 1)
    assert len(readable([folder_readable], 6)[0][0]) == 14
    assert readable([folder_readable], 0)[0][0] is folder_readable


def test_some_image_has_to_be_readable(folder_readable: ImageDataset) -> None:
    with pytest.raises(DataError, match=r"no image .* decoded: .*a/2\.png.*a/9\.png"):
        readable([folder_readable.subset(torch.tensor(BAD))], 10)


def test_several_processes_find_the_same(folder_readable: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(rank: int) -> torch.Tensor:
        share: list[torch.Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr(Compute, "sum_", lambda _, tensor: share.append(tensor) or tensor)
            find_unreadable(folder_readable, 10, Compute(torch.device("cpu"), rank=rank, world=2))
        return share[0]

    first, second = shares(0), shares(1)
    assert first.nonzero().flatten().tolist() == [2, 12] and second.nonzero().flatten().tolist() == [3, 9, 13, 19]
    monkeypatch.setattr(Compute, "sum_", lambda _, tensor: tensor.copy_(first + second))
    assert find_unreadable(folder_readable, 10, Compute(torch.device("cpu"), world=2)).positions.tolist() == BAD


def test_arrays_need_no_pass(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["cifar10"])
    never: Callable[..., None] = lambda *_: pytest.fail("read")  # noqa: E731
    monkeypatch.setattr(ImageDataset, "image", never)
    assert len(find_unreadable(digits, 10)) == 0


MNIST = PRESETS["mnist"]
HALVED = Preprocess("L", 14, 14, None, (0.5,), (0.5,))


def folder_overlap(root: Path, first: int, preprocess: Preprocess = MNIST) -> ImageDataset:
    """Twelve bitmaps of one size and the same names in every folder, of the shades from ``first``."""
    for shade in range(12):
        file = root / "ab"[shade % 2] / f"{shade}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((28, 28), first + shade, np.uint8)).save(file)
    return image_folder(root, preprocess)


def held(kind: str, shades: range) -> ImageDataset:
    """Images of these shades in memory."""
    pixels = np.stack([np.full((28, 28), shade, np.uint8) for shade in shades])
    sources = {
        "pictures": ArraySource(pixels),
        "inputs": TensorSource(pixels[:, None].astype(np.float32)),
        "files": EncodedSource([str(shade) for shade in shades], [encode(image) for image in pixels]),
    }
    return label_images(kind, ("a",), sources[kind], torch.zeros(len(shades), dtype=torch.int64), MNIST)


@pytest.mark.parametrize("preprocess", [MNIST, HALVED])
def test_one_folder_for_both(tmp_path: Path, preprocess: Preprocess) -> None:
    data = folder_overlap(tmp_path / "one", 0, preprocess)
    assert shared_images(data, data) == 12
    assert shared_images(data.subset(torch.arange(5)), data) == 5
    assert shared_images(data, data.subset(torch.tensor([11, 3]))) == 2
    assert shared_images(data.subset(torch.arange(6)), data.subset(torch.arange(6, 12))) == 0


def test_copies_of_files_are_told_from_other_files_of_equal_names_and_sizes(tmp_path: Path) -> None:
    train, others = folder_overlap(tmp_path / "train", 0), folder_overlap(tmp_path / "others", 100)
    shutil.copytree(tmp_path / "train", tmp_path / "copies")
    copies = image_folder(tmp_path / "copies", MNIST)
    assert shared_images(train, copies) == 12
    shutil.copy(tmp_path / "train" / "b" / "3.bmp", tmp_path / "others" / "b" / "3.bmp")
    assert shared_images(train, others) == 1


@pytest.mark.parametrize("suffix", ["bmp", "tiff", "png"])
def test_images_with_one_background(tmp_path: Path, suffix: str) -> None:
    """Bitmaps of one size that differ in a few pixels only, not those of their middle and end."""
    for name, first in {"train": 0, "val": 0, "others": 100}.items():
        (tmp_path / name / "a").mkdir(parents=True)
        for number in range(20):
            pixels = np.full((40, 40), 255, np.uint8)
            pixels[10, 10] = first + number
            Image.fromarray(pixels).save(tmp_path / name / "a" / f"{name} {number}.{suffix}")
    train, val, others = (image_folder(tmp_path / name, MNIST) for name in ("train", "val", "others"))
    assert (shared_images(train, val), shared_images(train, others)) == (20, 0)


def test_a_kept_folder(tmp_path: Path) -> None:
    train, others = folder_overlap(tmp_path / "train", 0, HALVED), folder_overlap(tmp_path / "others", 100, HALVED)
    kept = cache_images(train)
    assert kept.source is not train.source
    assert shared_images(kept, kept) == 12
    assert shared_images(kept, cache_images(others)) == 0
    last = cache_images(train.subset(torch.arange(9, 12)))  # Its first image is the tenth of the folder.
    assert shared_images(cache_images(train.subset(torch.arange(10))), last) == 1


def test_an_image_that_cannot_be_read_is_none_of_them(tmp_path: Path) -> None:
    train, val = folder_overlap(tmp_path / "train", 0), folder_overlap(tmp_path / "val", 0)
    (tmp_path / "val" / "a" / "0.bmp").unlink()
    assert shared_images(train, val) == 11


@pytest.mark.parametrize("kind", ["pictures", "inputs", "files"])
def test_images_in_memory(kind: str) -> None:
    assert shared_images(held(kind, range(10)), held(kind, range(6, 20))) == 4
    assert shared_images(held(kind, range(10)), held(kind, range(10, 20))) == 0


@pytest.mark.parametrize(
    ("bits", "kind", "said"),
    [
        (12, "png", "level 16 of 255, as if 12 bits were used: .* by 16 .* MaxSampleValue is 4095"),
        (10, "png", "level 4 of 255, as if 10 bits .* by 64 .* 1023"),
        (14, "tif", "level 64 of 255, as if 14 bits .* by 4 .* 16383"),
        (16, "png", ""),
        (15, "tif", ""),
        (8, "png", ""),
    ],
)
def test_files_of_16_bits_that_use_few_levels_are_told(tmp_path: Path, bits: int, kind: str, said: str) -> None:
    """Of files of 8 bits nobody knows a better scale, however dark they are."""
    root = write_folder(tmp_path, {"a": 2, "b": 2})
    for at, file in enumerate(sorted(root.glob("*/*.png"))):
        samples = np.full((5, 4), (1 << bits) - 1 if at == 3 else 3).astype(np.uint16 if bits > 8 else np.uint8)
        samples[0] = 0
        file.unlink()
        Image.fromarray(samples if bits > 8 else samples // 16).save(file.with_suffix(f".{kind}"))
    found = unused_levels(image_folder(root, TINY))
    assert re.search(said, found) if said else not found
    assert unused_levels(cache_images(image_folder(root, TINY), Scratch().folder)) == found


def test_the_remedies_of_few_levels_are_remedies(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    samples = GRADIENT.astype(np.uint16) * 18
    for file in root.glob("*/*.png"):
        Image.fromarray(samples * 16).save(file)
    assert not unused_levels(image_folder(root, TINY))
    for file in root.glob("*/*.png"):
        file.with_suffix(".tif").write_bytes(tiff_of(samples, t281=4095))
        file.unlink()
    assert not unused_levels(image_folder(root, TINY))
