"""Choose the training images that a model keeps, and make their thumbnails.

The images are drawn at random with a fixed seed, equally many of each class, because they have to be typical of the
training data.  The images farthest from each other (a k-centre) would be outliers, mislabelled ones among them, and the
images nearest to a class mean (herding) would all look alike.
"""

from __future__ import annotations

import torch
from jaxtyping import Int, UInt8
from torch import Tensor
from torch.nn import functional

from psc_core.data.dataset import ImageDataset, balanced_positions
from psc_core.errors import UsageError
from psc_core.images.preprocess import Pixels
from psc_core.thumbnails.thumbnails import MAX_COUNT, SIDE


def check_thumbnail_count(count: int, classes: int) -> None:
    """Check that the number of kept images covers the classes.

    Raises:
        UsageError: If it is smaller than their number, or larger than :data:`.thumbnails.MAX_COUNT`.
    """
    if not classes <= count <= MAX_COUNT:
        raise UsageError(
            f"expected keep_examples from {classes}, one training image of each class, to {MAX_COUNT}, got {count}"
        )


def kept_images(train: ImageDataset, count: int, seed: int) -> Int[Tensor, " kept"]:
    """Draw at most ``count`` images, balanced over classes, and return their positions; avoid ambiguous images."""
    firsts = train.first_labels()
    others = train.labels != firsts.repeat_interleave(train.offsets.diff())
    ambiguous = torch.zeros(len(train), dtype=torch.bool)
    ambiguous[torch.arange(len(train)).repeat_interleave(train.offsets.diff())[others]] = True
    has_clear = torch.zeros(len(train.classes), dtype=torch.bool)
    has_clear[firsts[~ambiguous]] = True
    candidates = (~ambiguous | ~has_clear[firsts]).nonzero()[:, 0]
    return candidates[balanced_positions(train.subset(candidates), count, seed)]


def thumbnails_of(images: Pixels) -> UInt8[Tensor, "batch channels rows columns"]:
    """Shrink images to at most :data:`.thumbnails.SIDE` pixels in each direction, keeping their proportions."""
    height, width = images.shape[2:]
    scale = SIDE / max(height, width)
    if scale >= 1:
        return images
    size = max(1, round(scale * height)), max(1, round(scale * width))
    return functional.interpolate(images, size, mode="bilinear", antialias=True)
