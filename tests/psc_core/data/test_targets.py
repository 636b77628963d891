"""Images with numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core.answers import Target
from psc_core.data.dataset import ArraySource, ImageDataset, measured
from psc_core.data.open import open_dataset
from psc_core.errors import DataError
from psc_core.images.preprocess import PRESETS
from tests.psc_core.data.support import TINY

AGE = Target(name="age", unit="years")


def numbers(values: list[float]) -> ImageDataset:
    source = ArraySource(np.zeros((len(values), 3, 3), np.uint8))
    return measured("some", AGE, source, torch.tensor(values, dtype=torch.float64), TINY)


def test_subset_and_batches_keep_the_numbers() -> None:
    data = numbers([3.0, 1.0, 2.0]).subset(torch.tensor([2, 0]))
    (batch,) = data.batches(5)
    assert batch.values is not None and batch.values.tolist() == [2.0, 3.0]
    assert data.digest() != numbers([2.0, 3.5]).digest() and data.digest() == numbers([2.0, 3.0]).digest()


@pytest.mark.parametrize(("values", "said"), [([1.0, float("nan")], "finite numbers of age, got 1"), ([], "at least")])
def test_unusable_numbers_are_refused(values: list[float], said: str) -> None:
    with pytest.raises(DataError, match=said):
        numbers(values)


def test_rotated_digits_are_digits_turned_by_their_angle(data_root: Path) -> None:
    turned, plain = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=PRESETS["mnist"])
        for name in ("rotated-mnist", "mnist")
    )
    again = open_dataset(f"rotated-mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    assert turned.values is not None and again.values is not None and torch.equal(turned.values, again.values)
    assert float(turned.values.abs().max()) <= 60 and float(turned.values.std()) > 30
    for index in range(20):
        back = Image.fromarray(turned.image(index)[0]).rotate(-float(turned.values[index]), Image.Resampling.BILINEAR)
        difference = np.abs(np.asarray(back, float) - plain.image(index)[0]).mean()
        wrong = np.abs(turned.image(index)[0].astype(float) - plain.image(index)[0]).mean()
        assert difference < max(12.0, wrong / 2)
