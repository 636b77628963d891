"""Splits: validation images held out of training images, and the two halves of the validation images."""

from __future__ import annotations

import torch

from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError


def held_out(dataset: ImageDataset, split: str, every: int) -> ImageDataset:
    """Every ``every``-th training image is for validation."""
    position = torch.arange(len(dataset))
    is_val = position % every == every - 1
    return dataset.subset(position[is_val if split == "val" else ~is_val])


def split_validation(val: ImageDataset, seed: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Two random halves of the validation images: one chooses, the other only calibrates.

    Layer, ranks, prior precision and temperature are chosen on the first; p-values, thresholds and prediction sets come
    from the second, which nothing was chosen on, so their stated rates hold.

    Raises:
        DataError: Fewer than two images.
    """
    if len(val) < 2:
        raise DataError(f"{val.name}: expected at least two validation images to split, got {len(val)}")
    order = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))
    half = len(val) // 2
    return val.subset(order[:half].sort().values), val.subset(order[half:].sort().values)
