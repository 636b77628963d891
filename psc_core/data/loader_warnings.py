"""Warnings about loaders that lose images or void the model's guarantees.

The order of the images does not matter, so no warning is about shuffling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset

from psc_core.data.cache import HOLD_OUT, REPEATED, image_keys
from psc_core.data.dataset import ImageDataset, TensorSource
from psc_core.errors import LoaderWarning, PSCError, UsageError, listed, warn
from psc_core.images import BACKGROUNDS
from psc_core.images.decode import IMAGE_FORMATS
from psc_core.images.preprocess import Preprocess, as_batch

# Number of examples that are read twice to see whether they change; a random flip may spare some of them.
READ_TWICE: Final = 8

# Tolerance for the mean difference between an input and its file, on the [0, 1] scale; another filter makes 0.01.
OTHER: Final = 0.02

# Maximum number of files whose headers are read to find their kinds: of a kind that is not rare, ten on average.
MAX_HEADERS: Final = 2000

RARE: Final = 0.005  # share of the files below which a kind of file changes no rate that anybody would notice
TRIED: Final = 32  # number of files of a kind with alpha among which some are sought whose background shows
SHOWN_KINDS: Final = 5

_ALPHA: Final = "alpha"

_SAME_IMAGES: Final = (
    "give mean and std, or the preprocess, of the loader's transform, let it turn photographs by "
    "PIL.ImageOps.exif_transpose, or write the images that it makes to files and fit on these"
)

OUTSIDE: Final = 0.05  # tolerance for inputs darker than black or brighter than white, on the [0, 1] scale


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
    Each kind of file is compared for itself: a fifth of them with alpha would be a fifth of false alarms.
    """
    dataset = dataset_of(data)
    paths = _paths_of(dataset)
    kinds = _kinds_of(paths)
    count, found = sum(map(len, kinds.values())), dict[str, tuple[float, float, str]]()
    for kind, indices in kinds.items():
        try:
            compared = _compare(dataset, paths, indices, _ways(preprocess, kind))
        except PSCError as error:
            warn(
                f"files of {name} that the loader reads would be refused in a service, {len(indices) / count:.1%} of "
                f"them ({kind}): {error}",
                LoaderWarning,
            )
        else:
            found |= {kind: compared} if compared[0] > OTHER else {}
    for remedy in dict.fromkeys(each[2] for each in found.values()):
        wrong = {kind: each for kind, each in found.items() if each[2] == remedy}
        share = sum(part * len(kinds[kind]) for kind, (_, part, _) in wrong.items()) / count
        which = f" in {share:.1%} of them ({listed(list(wrong), SHOWN_KINDS)})" if share < 1 else ""
        warn(
            f"files of {name} read as {preprocess} differ from the loader's inputs by "
            f"{max(each[0] for each in wrong.values()):.0%} of white{which}: a service would answer for other images "
            f"than these; {remedy}",
            LoaderWarning,
        )


def _paths_of(dataset: Any) -> list[str]:
    """Return the file of each example of an ``ImageFolder``, of a part of one or of several; none for others."""
    if isinstance(dataset, Subset):
        paths = _paths_of(dataset.dataset)
        return [paths[index] for index in dataset.indices] if paths else []
    if isinstance(dataset, ConcatDataset):
        parts = [_paths_of(each) for each in dataset.datasets]
        return [path for part in parts for path in part] if all(parts) else []
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list):
        return []
    paths = [sample[0] for sample in samples if isinstance(sample, tuple | list) and isinstance(sample[0], str)]
    return paths if len(paths) == len(samples) else []


def _kinds_of(paths: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of files by what their header says: format, mode, bits, alpha and orientation.

    Of many files a part is read, in no order: every tenth may be of one kind.  Rare kinds are left out.
    """
    count = min(len(paths), MAX_HEADERS)
    kinds: dict[str, list[int]] = {}
    for index in sorted(np.random.default_rng(0).choice(len(paths), count, replace=False).tolist()):
        with suppress(Exception), Image.open(paths[index], formats=IMAGE_FORMATS) as image:
            kinds.setdefault(_kind_of(image), []).append(index)
    return {kind: indices for kind, indices in kinds.items() if len(indices) >= RARE * count}


def _kind_of(image: Image.Image) -> str:
    """Describe what the header of a file says of its pixels."""
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) if "exif" in image.info else 1
    wide = any(";16" in str(tile.args) for tile in getattr(image, "tile", ())) and ";16" not in image.mode
    parts = [f"{image.format} {image.mode}", "16 bits" * wide, _ALPHA * image.has_transparency_data]
    return ", ".join(filter(None, [*parts, f"EXIF orientation {turned}" * (turned != 1)]))


def _ways(preprocess: Preprocess, kind: str) -> list[Preprocess]:
    """Return how files of a kind may be read: as the preprocess says, and with alpha on every other background."""
    others = [each for each in reversed(BACKGROUNDS) if each != preprocess.background] if _ALPHA in kind else []
    return [preprocess, *(replace(preprocess, background=each) for each in others)]


def _compare(
    dataset: Any, paths: Sequence[str], indices: Sequence[int], ways: list[Preprocess]
) -> tuple[float, float, str]:
    """Compare a few files of one kind, read in the first of the ways, with the loader's inputs.

    Returns:
        The median of the mean differences on the [0, 1] scale, the share of the files that it is of, and what to do
        about it.  Of files with alpha only those count whose background shows.
    """
    std = torch.tensor(ways[0].std)[:, None, None]
    found: list[list[float]] = []
    tried, refused = 0, None
    for index in (indices[at] for at in _spread(indices, READ_TWICE if len(ways) == 1 else TRIED)):
        inputs = _inputs_of(dataset[index], ways[0])
        if inputs is None or len(found) == READ_TWICE:
            break
        try:
            pixels = [way.standardise(as_batch([paths[index]], way)) for way in ways]
        except PSCError as error:
            refused = error
            continue
        tried += 1
        if len(ways) == 1 or not all(torch.equal(pixels[0], each) for each in pixels[1:]):
            found.append([float(((each - inputs) * std).abs().mean()) for each in pixels])
    if refused is not None and not tried:
        raise refused
    if not found:
        return 0.0, 0.0, ""
    differences = [median(of_way) for of_way in zip(*found, strict=True)]
    best = min(range(len(ways)), key=differences.__getitem__)
    if differences[0] > OTHER >= differences[best]:
        remedy = f'give a preprocess with background="{ways[best].background}", as the loader reads alpha'
        return differences[0], len(found) / tried, remedy
    return differences[0], len(found) / tried, _SAME_IMAGES


def _inputs_of(example: Any, preprocess: Preprocess) -> Tensor | None:
    """Return the image of an example of a data set as a batch of one input; None if it has another form."""
    image = example[0] if isinstance(example, tuple | list) and example else None
    if isinstance(image, Tensor) and image.shape == preprocess.shape:
        return preprocess.standardise(image[None])
    return preprocess.standardise(as_batch([image], preprocess)) if isinstance(image, Image.Image) else None


def _spread(dataset: Any, few: int = READ_TWICE) -> list[int]:
    """Return the indices of a few examples from all over a data set."""
    count = length_of(dataset) or 0
    return sorted({at * count // few for at in range(few)} if count else ())


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
