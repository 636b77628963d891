"""Make out-of-distribution images from in-distribution ones, so that choosing checks and maps needs no other data.

=========== =====================================================================  ====================================
transform   result                                                                 stands for
=========== =====================================================================  ====================================
mixed       mean of two images of different classes                                near: unseen classes, whose parts are
turned      by 90°                                                                 known and whose whole is not
upside_down by 180°
binary      each channel above its median white, else black                        far: other textures, contrasts and
contrast    deviations from the image's mean × 4                                   layouts
framed      black around the middle half of height and width
=========== =====================================================================  ====================================

If images are ambiguous by nature, a mix of two is in distribution and is left out.  A patch over a rectangle of a
quarter to a half of either side is anomalous at a known place: a ``crop`` of another image (CutPaste, Li et al. 2021)
stands for objects and seams; a ``texture``, stripes, checks or noise of two colours, for surfaces that no image has.

All images are ``uint8 (n, C, H, W)``, computed on the device of the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from psc_core.compute import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.images.preprocess import Pixels

IMAGES: Final = 1000  # maximum number of images from which others are made
REAL: Final = "real"
MIXED: Final = "mixed"

CONTRAST: Final = 4.0  # factor on the deviations from an image's mean


def mix(images: Pixels, labels: Int[Tensor, " batch"], generator: torch.Generator) -> UInt8[Tensor, "mixed _ _ _"]:
    """Average each image with a random partner, and leave out the pairs of one class."""
    partner = torch.randperm(len(images), generator=generator)
    other = labels != labels[partner]
    mean = (images[other].float() + images[partner[other]].float()) / 2
    return mean.round().to(torch.uint8)


def turn(images: Pixels) -> Pixels:
    """Rotate by 90°, and resize if the images are not square."""
    turned = torch.rot90(images, 1, (2, 3))
    if turned.shape == images.shape:
        return turned
    resized = functional.interpolate(turned.float(), images.shape[2:], mode="bilinear")
    return resized.round().to(torch.uint8)


def turn_upside_down(images: Pixels) -> Pixels:
    """Rotate by 180°."""
    return torch.rot90(images, 2, (2, 3))


def binarise(images: Pixels) -> Pixels:
    """Set each channel to white above its median, and to black elsewhere."""
    median = images.flatten(2).float().median(dim=2).values[:, :, None, None]
    return (images > median).to(torch.uint8) * 255


def raise_contrast(images: Pixels) -> Pixels:
    """Multiply the deviations from an image's mean by :data:`CONTRAST`, clamped to black and white."""
    grey: Float[Tensor, "batch 1 1 1"] = images.float().mean(dim=(1, 2, 3), keepdim=True)
    return torch.addcmul(grey, images - grey, torch.tensor(CONTRAST)).clamp(0, 255).round().to(torch.uint8)


def frame(images: Pixels) -> Pixels:
    """Keep the middle half of height and width, with black around it."""
    height, width = images.shape[2:]
    top, left = height // 4, width // 4
    framed = torch.zeros_like(images)
    middle = (..., slice(top, height - top), slice(left, width - left))
    framed[middle] = images[middle]
    return framed


# The transforms that need only one image.
TRANSFORMS: Final[Mapping[str, Callable[[Pixels], Pixels]]] = {
    "turned": turn,
    "upside_down": turn_upside_down,
    "binary": binarise,
    "contrast": raise_contrast,
    "framed": frame,
}


def synthetic_batches(
    dataset: ImageDataset, compute: Compute, description: str, *, mixed: bool, seed: int
) -> Iterator[Mapping[str, Pixels]]:
    """Yield at most :data:`IMAGES` images in batches on the device: the originals, and the output of each transform.

    A batch in which no pair has two classes, as that of a single image, has no mixes.
    """
    generator = torch.Generator().manual_seed(seed)
    drawn = dataset.subset(torch.randperm(len(dataset), generator=generator)[:IMAGES])
    for batch in track_images(drawn, compute, description):
        pixels = dataset.preprocess.to_pixels(batch.images)
        made = {REAL: pixels, **{transform: make(pixels) for transform, make in TRANSFORMS.items()}}
        if mixed and len(mixes := mix(pixels, batch.first_labels(), generator)):
            made[MIXED] = mixes
        yield {transform: images.to(compute.device) for transform, images in made.items()}


@torch.inference_mode()
def by_transform(
    batches: Iterable[Mapping[str, Tensor]], step: Callable[[Tensor], Mapping[Any, Tensor]]
) -> dict[str, dict[Any, Tensor]]:
    """Concatenate the results of ``step`` over the batches, (n, …) by transform and name, on the CPU.

    ``step`` maps a batch of pixels to named results, the same names for each batch.
    """
    parts: dict[str, dict[Any, list[Tensor]]] = {}
    for made in batches:
        for transform, images in made.items():
            for name, values in step(images).items():
                parts.setdefault(transform, {}).setdefault(name, []).append(values.cpu())
    return {
        transform: {name: torch.cat(each) for name, each in of_transform.items()}
        for transform, of_transform in parts.items()
    }


CROP: Final = "crop"
TEXTURE: Final = "texture"

PATCHES: Final = (CROP, TEXTURE)


def paste(images: Pixels, patch: str, generator: torch.Generator) -> tuple[Pixels, Bool[Tensor, "batch height width"]]:
    """Paste a patch into each image, and return the images and masks of the patches.

    A crop comes from another of these images, on the CPU, or from the image itself if it is the only one.
    """
    patched = images.clone()
    mask = torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)
    order = torch.randperm(len(images), generator=generator).tolist()
    for image, other in zip(order, [*order[1:], *order[:1]], strict=True):
        rows, columns = (_span(side, generator) for side in images.shape[2:])
        mask[image, rows, columns] = True
        height, width = rows.stop - rows.start, columns.stop - columns.start
        if patch == CROP:
            top, left = (_below(end, generator) for end in (images.shape[2] - height + 1, images.shape[3] - width + 1))
            put_in = images[other, :, top : top + height, left : left + width]
        else:
            put_in = _texture(images.shape[1], height, width, generator)
        patched[image, :, rows, columns] = put_in
    return patched, mask


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
