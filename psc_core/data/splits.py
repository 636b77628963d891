"""Splits of a data set: validation images held out of training images; the selection and the calibration split."""

from __future__ import annotations

import torch

from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError


def held_out(dataset: ImageDataset, split: str, every: int) -> ImageDataset:
    """The ``"train"`` or ``"val"`` split of training images, of which every ``every``-th is for validation."""
    position = torch.arange(len(dataset))
    is_val = position % every == every - 1
    return dataset.subset(position[is_val if split == "val" else ~is_val])


def split_validation(val: ImageDataset, seed: int = 0) -> tuple[ImageDataset, ImageDataset]:
    """Split the validation images at random into two halves: the selection split and the calibration split.

    The selection split selects layer, ranks, prior precision and temperature.  The calibration split gives p-values,
    thresholds and prediction sets; nothing was selected on it, so their stated rates hold.

    Raises:
        DataError: Fewer than two images.
    """
    if len(val) < 2:
        raise DataError(f"{val.name}: expected at least two validation images, got {len(val)}; add images")
    order = torch.randperm(len(val), generator=torch.Generator().manual_seed(seed))
    half = len(val) // 2
    return val.subset(order[:half].sort().values), val.subset(order[half:].sort().values)
