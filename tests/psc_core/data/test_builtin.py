from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from psc_core.data.open import open_dataset, read_idx, read_tar
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS


@pytest.mark.parametrize(("name", "preset"), [("mnist", "mnist"), ("fashion-mnist", "mnist"), ("cifar10", "cifar10")])
def test_splits_are_disjoint_and_complete(data_root: Path, name: str, preset: str) -> None:
    sets = {
        split: open_dataset(f"{name}:{data_root}", split=split, preprocess=PRESETS[preset])
        for split in ("train", "val", "test")
    }
    train, val = set(sets["train"].indices.tolist()), set(sets["val"].indices.tolist())
    assert not train & val
    assert sorted(train | val) == list(range(len(sets["train"].source)))
    assert len(sets["test"].classes) == 10
    assert len({s.digest() for s in sets.values()}) == 3


def test_dirty_mnist_has_ten_training_labels_per_ambiguous_image(data_root: Path) -> None:
    train = open_dataset(f"dirty-mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    assert (len(train), train.examples) == (1650 + 150, 1650 + 10 * 150)
    dirty = open_dataset(f"dirty-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    clean, ambiguous = dirty.groups["mnist"], dirty.groups["ambiguous-mnist"]
    assert (len(clean), len(ambiguous), dirty.examples) == (800, 300, 1100)
    raw = read_idx(data_root / "AmbiguousMNIST/raw/t10k-images-idx3-ubyte")
    assert np.array_equal(dirty.image(int(ambiguous[7]))[0], raw[7])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00\x00\x08",
        b"\x00\x00\x08\x00",
        b"\x00\x00\x08\x03\x00\x00",
        b"\x00\x00\x09\x01\x00\x00\x00\x01\x00",
        b"\x00\x00\x08\x01\x00\x00\x00\x05\x01",
    ],
)
def test_names_damaged_idx_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.gz").write_bytes(gzip.compress(content))
    with pytest.raises(DataError, match="x: expected"):
        read_idx(tmp_path / "x")


def test_names_damaged_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(b"\x00\x00\x08\x01\x00\x00\x00\x05hello")
    for damaged in (packed[:-9], packed[:10] + b"\xff" * 9 + packed[19:]):
        (tmp_path / "x.gz").write_bytes(damaged)
        with pytest.raises(DataError, match="cannot read the IDX file"):
            read_idx(tmp_path / "x")


def test_names_missing_archive(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="tar archive"):
        read_tar(tmp_path / "none.tar.gz", "x/")
