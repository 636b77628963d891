"""Validation images that are training images too are counted, whatever holds them."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image

from psc_core.data.cache import cached, shared_images
from psc_core.data.dataset import ArraySource, EncodedSource, FileSource, ImageDataset, TensorSource, labelled
from psc_core.data.open import image_folder
from psc_core.images.preprocess import PRESETS, Preprocess

MNIST = PRESETS["mnist"]
HALVED = Preprocess("L", 14, 14, None, (0.5,), (0.5,))


def folder(root: Path, first: int, preprocess: Preprocess = MNIST) -> ImageDataset:
    """Twelve bitmaps of one size and the same names in every folder, of the shades from ``first``."""
    for shade in range(12):
        file = root / "ab"[shade % 2] / f"{shade}.bmp"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((28, 28), first + shade, np.uint8)).save(file)
    return image_folder(root, preprocess)


def png(pixels: npt.NDArray[np.uint8]) -> bytes:
    Image.fromarray(pixels).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def held(kind: str, shades: range) -> ImageDataset:
    """Images of these shades in memory."""
    pixels = np.stack([np.full((28, 28), shade, np.uint8) for shade in shades])
    sources = {
        "pictures": ArraySource(pixels),
        "inputs": TensorSource(pixels[:, None].astype(np.float32)),
        "files": EncodedSource([str(shade) for shade in shades], [png(image) for image in pixels]),
    }
    return labelled(kind, ("a",), sources[kind], torch.zeros(len(shades), dtype=torch.int64), MNIST)


@pytest.mark.parametrize("preprocess", [MNIST, HALVED])
def test_one_folder_for_both(tmp_path: Path, preprocess: Preprocess) -> None:
    data = folder(tmp_path / "one", 0, preprocess)
    assert shared_images(data, data) == 12
    assert shared_images(data.subset(torch.arange(5)), data) == 5
    assert shared_images(data, data.subset(torch.tensor([11, 3]))) == 2
    assert shared_images(data.subset(torch.arange(6)), data.subset(torch.arange(6, 12))) == 0


def test_copies_of_files_are_told_from_other_files_of_equal_names_and_sizes(tmp_path: Path) -> None:
    train, others = folder(tmp_path / "train", 0), folder(tmp_path / "others", 100)
    shutil.copytree(tmp_path / "train", tmp_path / "copies")
    copies = image_folder(tmp_path / "copies", MNIST)
    assert shared_images(train, copies) == 12
    shutil.copy(tmp_path / "train" / "b" / "3.bmp", tmp_path / "others" / "b" / "3.bmp")
    assert shared_images(train, others) == 1


def test_copies_of_files_under_other_names(tmp_path: Path) -> None:
    train, val = folder(tmp_path / "train", 0), tmp_path / "val"
    for number, file in enumerate((tmp_path / "train").rglob("*.bmp")):
        (val / file.parent.name).mkdir(parents=True, exist_ok=True)
        shutil.copy(file, val / file.parent.name / f"copy ({number}).bmp")
    assert shared_images(train, image_folder(val, MNIST)) == 12


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
    train, others = folder(tmp_path / "train", 0, HALVED), folder(tmp_path / "others", 100, HALVED)
    kept = cached(train)
    assert kept.source is not train.source
    assert shared_images(kept, kept) == 12
    assert shared_images(kept, cached(others)) == 0
    last = cached(train.subset(torch.arange(9, 12)))  # Its first image is the tenth of the folder.
    assert shared_images(cached(train.subset(torch.arange(10))), last) == 1


def test_an_image_that_cannot_be_read_is_none_of_them(tmp_path: Path) -> None:
    train, val = folder(tmp_path / "train", 0), folder(tmp_path / "val", 0)
    (tmp_path / "val" / "a" / "0.bmp").unlink()
    assert shared_images(train, val) == 11


@pytest.mark.parametrize("kind", ["pictures", "inputs", "files"])
def test_images_in_memory(kind: str) -> None:
    assert shared_images(held(kind, range(10)), held(kind, range(6, 20))) == 4
    assert shared_images(held(kind, range(10)), held(kind, range(10, 20))) == 0


def test_training_files_are_opened_only_where_a_validation_file_has_their_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sizes in {"train": (1, 2, 3, 3, 4, 500, 501), "val": (3, 501, 600)}.items():
        (tmp_path / name / "a").mkdir(parents=True)
        for number, size in enumerate(sizes):
            (tmp_path / name / "a" / f"{number}.png").write_bytes(bytes([number % 2]) * size)
    train, val = (image_folder(tmp_path / name, MNIST) for name in ("train", "val"))
    opened: list[Path] = []
    sample = FileSource.sample
    monkeypatch.setattr(
        FileSource, "sample", lambda files, index: (opened.append(files.path(index)), sample(files, index))[1]
    )
    shown: list[Sequence[int]] = []
    assert shared_images(train, val, lambda positions: shown.append(positions) or positions) == 1
    assert [path.name for path in opened if path.is_relative_to(tmp_path / "train")] == ["2.png", "3.png", "6.png"]
    assert shown == [range(7)]
