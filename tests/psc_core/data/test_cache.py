"""Each image is decoded once, and nothing is left behind."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core.data import cache
from psc_core.data.cache import CachedSource, Scratch, cached, mapped, pixel_bytes
from psc_core.data.dataset import FileSource, ImageDataset, split_validation
from psc_core.data.open import open_dataset
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS

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
    kept = cached(folder)
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
        assert mapped(file, (2, 2), np.uint8).tolist() == [[1, 2], [0, 0]]


def test_leaves_no_file(folder: ImageDataset, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    kept = cached(folder, scratch)
    pixels(kept)
    assert list(scratch.iterdir()) == []
    del kept
    gc.collect()


def test_takes_the_space_of_the_images_that_are_read(folder: ImageDataset) -> None:
    few = folder.subset(torch.tensor([7, 2, 5]))
    kept = cached(few)
    assert isinstance(kept.source, CachedSource) and kept.source.pixels.shape == (3, *PREPROCESS.shape)
    assert torch.equal(pixels(kept), pixels(few)) and torch.equal(pixels(kept), pixels(folder)[[7, 2, 5]])
    assert kept.digest() == few.digest() and len(kept.source) == 3
    times = [few.source.modified_ns(index) for index in (7, 2, 5)]
    assert [kept.source.modified_ns(index) for index in range(3)] == times and min(times) > 0


def test_space_is_needed_once_for_what_is_decoded(folder: ImageDataset) -> None:
    size = len(folder) * 3 * 8 * 8
    kept, two = cached(folder), folder.subset(torch.arange(2))
    assert pixel_bytes(folder) == size and pixel_bytes(kept) == 0 and cached(kept) is kept
    assert pixel_bytes(replace(kept, preprocess=replace(PREPROCESS, height=4))) == size // 2
    assert Scratch(processes=3).size(folder, kept, two) == 3 * (size + size // 5)


def test_takes_at_most_half_of_the_free_space(
    folder: ImageDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "posix_fallocate", full)
    assert cached(folder) is folder
    with pytest.raises(UsageError, match="No space left on device; choose another --cache or off"):
        cached(folder, tmp_path)
    with pytest.raises(UsageError, match="No such file or directory"):
        cached(folder, tmp_path / "nowhere")


def test_arrays_of_the_right_size_are_read_as_they_are(data_root: Path) -> None:
    digits = open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    assert cached(digits) is digits and pixel_bytes(digits) == 0
