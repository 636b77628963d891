"""Strips of digits: their labels, their splits, and the classes that are held out."""

from pathlib import Path

import pytest
import torch

from benchmarks import strips
from benchmarks.strips import PLACES, known_classes, preprocess_of
from psc_core import ImageDataset, open_dataset
from tests.opened import opened

SPLITS = ("train", "val", "test")


def digits(split: str) -> tuple[ImageDataset, dict[bytes, int]]:
    """Return the digits of a split, and the label of each by its pixels."""
    data = opened("mnist", split)
    return data, {data.image(i).tobytes(): int(label) for i, label in enumerate(data.first_labels())}


@pytest.mark.parametrize("kind", PLACES)
def test_strips_have_digits_of_their_split_in_the_order_of_their_names(kind: str) -> None:
    for split in SPLITS:
        source, label_of = digits(split)
        others = {pixels for other in SPLITS if other != split for pixels in digits(other)[1]}
        assert others.isdisjoint(label_of)
        data = strips.strips(source, PLACES[kind], 2, preprocess_of(kind))
        assert len(data) == 2 * len(data.classes) == 2 * 10 ** PLACES[kind]
        for i in range(0, len(data), 7):
            parts = torch.tensor(data.image(i)).split(28, dim=2)
            name = "".join(str(label_of[part.contiguous().numpy().tobytes()]) for part in parts)
            assert name == data.classes[data.first_labels()[i]]


@pytest.mark.parametrize("places", PLACES.values())
def test_known_classes_have_every_digit_in_every_place(places: int) -> None:
    known, others = known_classes(places)
    assert sorted([*known, *others]) == [*range(10**places)] and len(known) == 0.8 * 10**places
    for place in range(places):
        assert {number // 10**place % 10 for number in known} == {*range(10)}


def test_known_and_other_classes_are_apart(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PSC_DATA", str(data_root))
    known, others = (
        open_dataset(f"benchmarks.strips:pairs_{which}", split="test", preprocess=preprocess_of("pairs"))
        for which in ("known", "unknown")
    )
    assert (len(known.classes), len(others.classes)) == (80, 20) and {*known.classes}.isdisjoint(others.classes)
    assert known.image(0).shape == (1, 28, 56)
