"""Images that each have a measured number."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.data.dataset import ImageDataset
from psc_core.data.sources import ImageSource
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess
from psc_core.target import Target


def known_values(values: Tensor | None) -> Tensor:
    """Return the target values of images; raise :class:`DataError` if the images have classes instead."""
    if values is None:
        raise DataError("expected images with numbers, got images with classes; give images for the model's task")
    return values


def measured(
    name: str, target: Target, source: ImageSource, values: Float[Tensor, " n"], preprocess: Preprocess
) -> ImageDataset:
    """Create a data set of the n images in ``source`` with target ``values``, all in one bin.

    Raises:
        DataError: If there are no images, not as many values as images, or a value is not finite.
    """
    count = len(values)
    if len(source) != count or count == 0:
        raise DataError(
            f"{name}: expected one {target.name} per image and at least one image, got {count} and {len(source)} images"
        )
    odd = int((~values.isfinite()).sum())
    if odd:
        raise DataError(f"{name}: expected finite numbers of {target.name}, got {odd} that are not; leave them out")
    labels, offsets = torch.zeros(count, dtype=torch.int64), torch.arange(count + 1)
    return ImageDataset(
        name, (target.name,), source, torch.arange(count), labels, offsets, preprocess,
        target=target, values=values.double(),
    )  # fmt: skip
