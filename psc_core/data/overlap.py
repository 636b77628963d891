"""Find the validation images that are training images too, wherever both are stored."""

from __future__ import annotations

import filecmp
import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

import numpy as np

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import FileSource, TensorSource
from psc_core.errors import DataError

REPEATED: Final = 0.01
"""Fraction of the validation images that may be duplicates: real data sets have a few by accident."""

COMPARED_VALUES: Final = 4096
"""Maximum number of values that the key of an image in an array is made of."""


def shared_images(train: ImageDataset, val: ImageDataset) -> int:
    """Return how many images of ``val`` are images of ``train``; of files their copies count, whatever their names."""
    positions = {key: position for position, key in enumerate(image_keys(val))}  # Of the smaller set, to save memory.
    shared: set[bytes] = set()
    for position, key in enumerate(image_keys(train)):
        if key in positions and key not in shared and _same(train, position, val, positions[key]):
            shared.add(key)
    return len(shared)


def image_keys(data: ImageDataset) -> Iterator[bytes]:
    """Yield a key for each image; copies of it have the same key, and of other images in a data set only few."""
    for index in data.indices.tolist():
        match data.source:
            case FileSource() as files:
                key = files.sample(index)
            case TensorSource(images=images):
                values = images[index].reshape(-1)
                key = values[:: max(1, len(values) // COMPARED_VALUES)].tobytes()
            case source:
                key = source.fingerprint(index)
        yield hashlib.blake2b(key, digest_size=16).digest()


def _same(one: ImageDataset, position: int, other: ImageDataset, at: int) -> bool:
    """Return whether two images of the same key are the same image; one that cannot be read equals none."""
    first, second = int(one.indices[position]), int(other.indices[at])
    with suppress(DataError, OSError):
        if isinstance(one.source, FileSource) and isinstance(other.source, FileSource):
            return filecmp.cmp(one.source.path(first), other.source.path(second), shallow=False)
        return np.array_equal(
            one.source.read(first, one.preprocess), other.source.read(second, other.preprocess), equal_nan=True
        )
    return False
