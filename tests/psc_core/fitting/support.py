"""Data sets that count how often an image is read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from psc_core.data.dataset import ImageDataset, ImageSource
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess


@dataclass(frozen=True)
class Counted:
    """A source that counts how often each image is read."""

    inner: ImageSource
    reads: Counter[int] = field(default_factory=Counter)

    def __len__(self) -> int:
        return len(self.inner)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        self.reads[index] += 1
        return self.inner.read(index, preprocess)

    def fingerprint(self, index: int) -> bytes:
        return self.inner.fingerprint(index)

    def modified_ns(self, index: int) -> int:
        return self.inner.modified_ns(index)


def counted(data_root: Path, split: str) -> tuple[ImageDataset, Counter[int]]:
    dataset = open_dataset(f"mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
    source = Counted(dataset.source)
    return replace(dataset, source=source), source.reads


def typical(reads: Counter[int]) -> int:
    """Reads of the median image: the first one also serves as the trial input."""
    return reads.most_common()[len(reads) // 2][1]
