"""Images read from arrays and files, and the file that an error names."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core.data.dataset import ArraySource, labelled
from psc_core.data.open import image_folder
from psc_core.errors import DataError
from tests.psc_core.data.support import TINY, write_folder


@pytest.mark.parametrize("size", [(2, 2), (3, 3)])
def test_array_shortcut_equals_reading_one_by_one(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (9, *size), dtype=np.uint8)
    dataset = labelled("noise", "ab", ArraySource(pixels), torch.arange(9) % 2, TINY).subset(torch.tensor([8, 3, 3, 0]))
    (batch,) = dataset.batches(9)
    assert np.array_equal(batch.images.numpy(), np.stack([dataset.image(i) for i in range(4)]))


def test_names_damaged_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    (root / "b" / "0.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"b.0\.png: expected one of JPEG"):
        list(image_folder(root, TINY).batches(10))


def test_names_unreadable_file(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    (root / "b" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    folder = image_folder(root, TINY)
    with pytest.raises(DataError, match=r"gone\.png.*repair or remove"):
        list(folder.batches(10))
    assert len(folder.digest()) == 64, "a fit names, counts and leaves out such an image"


def test_file_names_may_be_any_bytes(tmp_path: Path) -> None:
    root = write_folder(tmp_path, {"a": 1, "b": 1})
    source = root / "b" / "0.png"
    (root / "b" / os.fsdecode(b"caf\xe9.png")).write_bytes(source.read_bytes())
    folder = image_folder(root, TINY)
    assert sum(len(batch.images) for batch in folder.batches(10)) == 3
    assert folder.digest()
