"""Find the validation images that are training images too, wherever both are stored, and refuse them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Final

from psc_core.data.cache import CachedSource
from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import FileSource, ImageSource, TensorSource
from psc_core.errors import ImageError, UsageError
from psc_core.images.files import read_file

REPEATED: Final = 0.01
"""Fraction of the validation images that may be duplicates: real data sets have a few by accident."""

HOLD_OUT: Final = "calibration on training images does not hold for new ones, so hold some images out"
"""The remedy, for messages."""

COMPARED_VALUES: Final = 4096
"""Maximum number of values that the key of an image in an array is made of."""


def shared_images(train: ImageDataset, val: ImageDataset, show: Callable[[Sequence[int]], Iterable[int]] = iter) -> int:
    """Return how many images of ``val`` are images of ``train``; of files their copies count, whatever their names.

    Args:
        train: Training images.
        val: Validation images.
        show: Yields the positions of the training images, and shows how many are done.
    """
    sizes = {_file_size(val, position) for position in range(len(val))}
    keys = [*image_keys(val)]
    contents: dict[bytes, set[bytes | None]] = {key: set() for key in keys}
    for position in show(range(len(train))):
        # A file is opened only where a validation image has its size: on a network that takes most of the time.
        if _file_size(train, position) in sizes and (key := _key(train, position)) in contents:
            contents[key].add(_content(train, position))
    unreadable = {None}
    # Different images may have one key: of bitmaps with the same background nearly all do.
    return sum(
        bool(of_train := contents[key] - unreadable) and _content(val, position) in of_train
        for position, key in enumerate(keys)
    )


def check_disjoint(
    train: ImageDataset,
    val: ImageDataset,
    show: Callable[[Sequence[int]], Iterable[int]] = iter,
) -> None:
    """Require validation images that are not training images, but for a few accidental duplicates.

    Args:
        train: Training images.
        val: Validation images.
        show: Yields the positions of the training images, and shows how many are done.

    Raises:
        UsageError: If more are shared.
    """
    shared = shared_images(train, val, show)
    if shared > REPEATED * len(val):
        raise UsageError(
            f"expected validation images that the network was not trained on, {shared} of the {len(val)} images of "
            f"{val.name} are training images too; {HOLD_OUT}"
        )


def image_keys(data: ImageDataset) -> Iterator[bytes]:
    """Yield a key for each image; copies of it have the same key, and of other images in a data set mostly few."""
    return (_key(data, position) for position in range(len(data)))


def _key(data: ImageDataset, position: int) -> bytes:
    match _origin(data, position):
        case FileSource() as files, index:
            key = files.sample(index)
        case TensorSource(images=images), index:
            values = images[index].reshape(-1)
            key = values[:: max(1, len(values) // COMPARED_VALUES)].tobytes()
        case source, index:
            key = source.fingerprint(index)
    return _digest(key)


def _file_size(data: ImageDataset, position: int) -> int | None:
    """Return the size of an image's file; None for an image in memory."""
    source, index = _origin(data, position)
    return source.size(index) if isinstance(source, FileSource) else None


def _content(data: ImageDataset, position: int) -> bytes | None:
    """Return a digest of all of an image; None if it cannot be read."""
    with suppress(ImageError, OSError):
        match _origin(data, position):
            case FileSource() as files, index:
                return _digest(read_file(files.path(index)))
            case source, index:
                return _digest(source.fingerprint(index))
    return None


def _origin(data: ImageDataset, position: int) -> tuple[ImageSource, int]:
    """Return the store of an image, behind a cache, and its index there."""
    source, index = data.source, int(data.indices[position])
    return (source.origin, int(source.indices[index])) if isinstance(source, CachedSource) else (source, index)


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()
