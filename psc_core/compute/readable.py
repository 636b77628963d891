"""Find images that cannot be decoded before anything is computed, so that a few of them do not end a fit.

If pixels are cached (:mod:`psc_core.data.cache`), this pass is the one that decodes them, at no extra cost.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Int
from torch import Tensor

from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import track
from psc_core.data.dataset import DECODERS, ImageDataset
from psc_core.data.sources import ArraySource, TensorSource
from psc_core.errors import DataError, ImageError

SHOWN_IMAGES: Final = 5
"""Maximum number of images that a message names."""

_AT_ONCE: Final = 256


@dataclass(frozen=True)
class Unreadable:
    """The images of a data set that cannot be decoded; if there are too many, only the first ones found."""

    positions: Int[Tensor, " n"]  # in the data set, ascending
    reasons: tuple[str, ...]  # for the first :data:`SHOWN_IMAGES`, each with the image's name

    def __len__(self) -> int:
        return len(self.positions)


NONE: Final = Unreadable(torch.empty(0, dtype=torch.int64), ())


def find_unreadable(dataset: ImageDataset, at_most: int, reducer: Reducer | None = None) -> Unreadable:
    """Decode each image to find those that cannot be decoded; processes share the work and all get the same result.

    Args:
        dataset: The images; arrays need no decoding.
        at_most: The number of unreadable images after which the search ends early.
        reducer: This process among those that fit one model.
    """
    reducer = reducer or Reducer()
    is_bad = torch.zeros(len(dataset), dtype=torch.int64)
    if not isinstance(dataset.source, ArraySource | TensorSource):
        chunks = torch.split(torch.arange(reducer.rank, len(dataset), reducer.world), _AT_ONCE)
        with ThreadPoolExecutor(DECODERS, "psc-decode") as pool:
            for chunk in track(chunks, total=len(chunks), description=f"decoding {dataset.name}"):
                reasons = pool.map(lambda position: why_unreadable(dataset, position), chunk.tolist())
                is_bad[chunk] = torch.tensor([reason is not None for reason in reasons], dtype=torch.int64)
                if int(is_bad.sum()) > at_most:
                    break
    positions = reducer.sum_(is_bad).nonzero().flatten()
    first = (why_unreadable(dataset, position) for position in positions[:SHOWN_IMAGES].tolist())
    return Unreadable(positions, tuple(filter(None, first)))


def why_unreadable(dataset: ImageDataset, position: int) -> str | None:
    """Return the reason why an image cannot be decoded, with its name; None if it can."""
    try:
        dataset.image(position)
    except (DataError, ImageError) as error:
        return str(error)
    return None


def without(dataset: ImageDataset, found: Unreadable) -> ImageDataset:
    """Return the data set without the images found, or the data set itself if there are none."""
    if not len(found):
        return dataset
    is_kept = torch.ones(len(dataset), dtype=torch.bool)
    is_kept[found.positions] = False
    return dataset.subset(is_kept.nonzero().flatten())


def only_readable(dataset: ImageDataset, at_most: int) -> ImageDataset:
    """Return the images that can be decoded; with ``at_most`` 0 nothing is checked.

    Raises:
        DataError: If more than ``at_most`` images cannot be decoded.
    """
    if not at_most:
        return dataset
    found = find_unreadable(dataset, at_most)
    check_unreadable(at_most, found)
    return without(dataset, found)


def check_unreadable(at_most: int, *found: Unreadable) -> None:
    """Raise :class:`DataError` if more than ``at_most`` images, of all data sets together, cannot be decoded."""
    count, reasons = sum(map(len, found)), [reason for each in found for reason in each.reasons]
    if count > at_most:
        raise DataError(
            f"expected at most {at_most} images that cannot be decoded, found more: {'; '.join(reasons[:SHOWN_IMAGES])}"
            f"{'; …' * (count > SHOWN_IMAGES)}; repair or remove them, or leave out more by --max-bad-images of psc-fit"
        )
