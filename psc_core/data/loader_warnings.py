"""Warnings about loaders that lose images or void the model's guarantees.

The order of the images does not matter, so no warning is about shuffling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from psc_core.data.dataset import ImageDataset
from psc_core.data.overlap import HOLD_OUT, REPEATED, image_keys
from psc_core.data.sources import TensorSource
from psc_core.errors import LoaderWarning, PSCError, UsageError, warn
from psc_core.images.inputs import as_batch
from psc_core.images.preprocess import Preprocess

READ_TWICE: Final = 8
"""Number of examples that are read twice to see whether they change; a random flip may spare some of them."""

OTHER: Final = 0.02
"""Tolerance for the mean difference between an input and its file, on the [0, 1] scale; another filter makes 0.01."""

OUTSIDE: Final = 0.05
"""Tolerance for inputs darker than black or brighter than white, on the [0, 1] scale."""


def warn_of_random(data: Any, name: str) -> bool:
    """Warn if an example of the data set differs when it is read again; return whether it does."""
    dataset = dataset_of(data)
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset | list | tuple | Mapping):
        return False
    for index in _spread(dataset):
        if not _same(dataset[index], dataset[index]):
            warn(
                f"{name} changes its images at random, example {index} read twice differs: a model fitted and "
                "calibrated on augmented images does not hold for unaugmented images; give a loader without "
                "augmentation",
                LoaderWarning,
            )
            return True
    return False


def warn_of_files(data: Any, name: str, preprocess: Preprocess) -> None:
    """Warn if the files of an ``ImageFolder``, read through ``preprocess``, are not what its transform makes of them.

    A letterbox or a crop before the resize, which no :class:`.Preprocess` has, is otherwise noticed only in service.
    """
    dataset, found = dataset_of(data), list[float]()
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list):
        return
    for index in _spread(dataset):
        match samples[index], dataset[index]:
            case (str(path), _), (Tensor() as inputs, _) if inputs.shape == preprocess.shape:
                with suppress(PSCError):
                    pixels = preprocess.standardise(as_batch([path], preprocess))
                    found.append(float(((pixels - inputs) * torch.tensor(preprocess.std)[:, None, None]).abs().mean()))
    if found and (usual := median(found)) > OTHER:  # A few may only lie on their side, which their EXIF tells us alone.
        warn(
            f"files of {name} read as {preprocess} differ from the loader's inputs by {usual:.0%} of white: "
            "a service would answer for other images than these; give mean and std, or the preprocess, of the loader's "
            "transform, let it turn photographs by PIL.ImageOps.exif_transpose, or write the images that it makes to "
            "files and fit on these",
            LoaderWarning,
        )


def _spread(dataset: Any) -> list[int]:
    """Return the indices of a few examples from all over a data set."""
    count = length_of(dataset) or 0
    return sorted({at * count // READ_TWICE for at in range(READ_TWICE)} if count else ())


def warn_of_dropped(data: Any, name: str, count: int) -> None:
    """Warn if a loader with ``drop_last`` left out images; it returned ``count``."""
    drops = any(getattr(each, "drop_last", False) for each in (data, getattr(data, "batch_sampler", None)))
    expected = length_of(data.sampler) if isinstance(data, DataLoader) else None
    if drops and (expected is None or count < expected):
        left = "images" if expected is None else f"{expected - count} images"
        warn(f"the loader of {name} drops {left} of its last batch; give one with drop_last=False", LoaderWarning)


def warn_of_range(name: str, preprocess: Preprocess, low: Sequence[float], high: Sequence[float]) -> None:
    """Warn about inputs that no pixel value becomes, because their transform must have been another one."""
    darkest, brightest = (
        [value * std + mean for value, mean, std in zip(ends, preprocess.mean, preprocess.std, strict=True)]
        for ends in (low, high)
    )
    if min(darkest) < -OUTSIDE or max(brightest) > 1 + OUTSIDE:
        warn(
            f"inputs of {name} from {min(low):.3g} to {max(high):.3g} would be pixels from {min(darkest):.3g} to "
            f"{max(brightest):.3g} on the scale from 0 to 1; give the mean and std of the loader's transform",
            LoaderWarning,
        )


def check_apart(train: Any, val: Any) -> None:
    """Raise :class:`UsageError` if both loaders give all examples of one data set, even one that changes them."""
    if dataset_of(train) is dataset_of(val) and _is_whole(train) and _is_whole(val):
        raise UsageError(
            f"expected validation images that the network was not trained on, got one data set for both; {HOLD_OUT}"
        )


def warn_of_repeated(val: ImageDataset) -> None:
    """Warn if validation images repeat, as happens with a sampler that draws with replacement."""
    count = len(val) - len({*image_keys(val)}) if isinstance(val.source, TensorSource) else 0
    if count > REPEATED * len(val):
        warn(
            f"{count} of {len(val)} validation images are repeated, so that fewer calibrate than are counted; give "
            "each once, without a sampler that draws with replacement",
            LoaderWarning,
        )


def dataset_of(data: Any) -> Any:
    """Return the data set behind a DataLoader; any other object is its own data set."""
    return data.dataset if isinstance(data, DataLoader) else data


def _is_whole(data: Any) -> bool:
    """Return whether a loader yields every example of its data set."""
    return not isinstance(data, DataLoader) or length_of(data.sampler) == length_of(data.dataset)


def length_of(data: Any) -> int | None:
    """Return the number of examples, or None if it is unknown."""
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def _same(one: Any, other: Any) -> bool:
    """Return whether two readings of an example agree in the parts that augmentation changes."""
    match one:
        case Tensor():
            return torch.equal(one, other)
        case np.ndarray():
            return np.array_equal(one, other)
        case Image.Image():
            return bool(one.tobytes() == other.tobytes())
        case Mapping():
            return all(_same(one[key], other[key]) for key in one)
        case list() | tuple():
            return all(map(_same, one, other))
        case _:
            return True
