"""Make images with something anomalous at a known place from in-distribution ones, so that a layer can be chosen.

======== ========================================================================  ===========================
patch    what is pasted over a rectangle of a quarter to a half of either side     stands for
======== ========================================================================  ===========================
crop     a crop of another image (CutPaste, Li et al. 2021)                        objects, seams
texture  stripes, checks or noise of two colours                                   surfaces that no image has
======== ========================================================================  ===========================
"""

from __future__ import annotations

from typing import Final

import torch
from jaxtyping import Bool, UInt8
from torch import Tensor

from psc_core.images.preprocess import Pixels

CROP: Final = "crop"
TEXTURE: Final = "texture"

PATCHES: Final = (CROP, TEXTURE)


def paste(images: Pixels, patch: str, generator: torch.Generator) -> tuple[Pixels, Bool[Tensor, "batch height width"]]:
    """Paste a patch into each image, and return the images and masks of the patches.

    Args:
        images: Images on the CPU.  A crop comes from another of these images, or from the image itself if it is the
            only one.
        patch: One of :data:`PATCHES`.
        generator: Draws the places, pairs and textures.
    """
    pasted = images.clone()
    mask = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    order = torch.randperm(len(images), generator=generator).tolist()
    for image, other in zip(order, [*order[1:], *order[:1]], strict=True):
        rows, columns = (_span(side, generator) for side in images.shape[2:])
        mask[image, rows, columns] = True
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if patch == CROP:
            top, left = (_below(end, generator) for end in (images.shape[2] - height + 1, images.shape[3] - width + 1))
            pasted_in = images[other, :, top : top + height, left : left + width]
        else:
            pasted_in = _texture(images.shape[1], height, width, generator)
        pasted[image, :, rows, columns] = pasted_in
    return pasted, mask


def _texture(channels: int, height: int, width: int, generator: torch.Generator) -> UInt8[Tensor, "channels _ _"]:
    """Return stripes, checks or noise of two colours and a random period."""
    colours = torch.randint(0, 256, (2, channels), generator=generator, dtype=torch.uint8)
    period = 1 + _below(max(1, min(height, width) // 4), generator)
    down, across = (torch.arange(side) // period for side in (height, width))
    which = _below(3, generator)
    if which == 0:
        pattern = (down[:, None] + 0 * across) % 2
    elif which == 1:
        pattern = (down[:, None] + across) % 2
    else:
        pattern = torch.randint(0, 2, (height, width), generator=generator)
    return colours[pattern].permute(2, 0, 1)


def _span(side: int, generator: torch.Generator) -> slice:
    """Draw a span of a quarter to a half of a side, at least one pixel."""
    length = max(1, side // 4 + _below(max(1, side // 4 + 1), generator))
    start = _below(side - length + 1, generator)
    return slice(start, start + length)


def _below(end: int, generator: torch.Generator) -> int:
    return int(torch.randint(0, end, (), generator=generator))
