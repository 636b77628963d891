"""Images that cannot be decoded are found by one pass, which decodes the others for good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from psc_core.compute import Compute
from psc_core.data import cache as readable
from psc_core.data.cache import cached, find_unreadable, only_readable, without
from psc_core.data.dataset import FileSource, ImageDataset
from psc_core.data.open import image_folder, open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS
from tests.psc_core.data.support import TINY, write_folder


@pytest.fixture
def folder(tmp_path: Path) -> ImageDataset:
    """Ten images a class; of each the third is empty, the fourth text, the last cut off."""
    root = write_folder(tmp_path / "images", {"a": 10, "b": 10})
    for name in "ab":
        whole = (root / name / "9.png").read_bytes()
        for file, content in (("2", b""), ("3", b"text"), ("9", whole[: len(whole) // 2])):
            (root / name / f"{file}.png").write_bytes(content)
    return image_folder(root, TINY)


BAD = [2, 3, 9, 12, 13, 19]


def test_finds_and_names_them(folder: ImageDataset) -> None:
    found = find_unreadable(folder, 10)
    assert found.positions.tolist() == BAD and len(found) == len(BAD)
    assert len(found.reasons) == readable.SHOWN_IMAGES
    assert "a/2.png: expected one of JPEG" in found.reasons[0] and "a/9.png: " in found.reasons[2]
    kept = without(folder, found)
    assert len(kept) == 14 and kept.first_labels().tolist() == [0] * 7 + [1] * 7
    assert sum(len(batch.images) for batch in kept.batches(4)) == 14
    assert len(find_unreadable(kept, 1)) == 0 and without(kept, find_unreadable(kept, 1)) is kept


def test_ends_early_where_there_are_more(folder: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readable, "_AT_ONCE", 5)
    assert find_unreadable(folder, 1).positions.tolist() == BAD[:2]
    with pytest.raises(DataError, match=r"at most 1 images .* found more: .*a/2\.png.*3\.png.*by --max-bad-images"):
        only_readable(folder, 1)
    assert len(only_readable(folder, 6)) == 14
    assert only_readable(folder, 0) is folder


def test_several_processes_find_the_same(folder: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    def shares(rank: int) -> torch.Tensor:
        share: list[torch.Tensor] = []
        with monkeypatch.context() as patch:
            patch.setattr(Compute, "sum_", lambda _, tensor: share.append(tensor) or tensor)
            find_unreadable(folder, 10, Compute(torch.device("cpu"), rank=rank, world=2))
        return share[0]

    first, second = shares(0), shares(1)
    assert first.nonzero().flatten().tolist() == [2, 12] and second.nonzero().flatten().tolist() == [3, 9, 13, 19]
    monkeypatch.setattr(Compute, "sum_", lambda _, tensor: tensor.copy_(first + second))
    assert find_unreadable(folder, 10, Compute(torch.device("cpu"), world=2)).positions.tolist() == BAD


def test_each_image_is_decoded_once_with_a_cache(folder: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = Counter[int]()
    decode = FileSource.read

    def counted(source: FileSource, index: int, preprocess: object) -> object:
        reads[index] += 1
        return decode(source, index, preprocess)  # type: ignore[arg-type]

    monkeypatch.setattr(FileSource, "read", counted)
    kept = cached(folder)
    kept = without(kept, find_unreadable(kept, 10))
    for _ in range(2):
        assert sum(len(batch.images) for batch in kept.batches(4)) == 14
    assert {reads[index] for index in range(len(folder)) if index not in BAD} == {1}


def test_arrays_need_no_pass(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["cifar10"])
    never: Callable[..., None] = lambda *_: pytest.fail("read")  # noqa: E731
    monkeypatch.setattr(ImageDataset, "image", never)
    assert len(find_unreadable(digits, 10)) == 0
