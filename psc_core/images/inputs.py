"""Images as users have them, read into the network's pixels; inputs of a loader stay as they are."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from psc_core.errors import UsageError
from psc_core.images.decode import to_grey_or_rgb
from psc_core.images.files import read_file
from psc_core.images.preprocess import Images, Preprocess

ImageLike = str | Path | bytes | Image.Image | npt.NDArray[Any]
"""One image: a path, an encoded file, a Pillow image, or ``uint8`` pixels (height, width) or (height, width, 3)."""


def as_batch(images: Sequence[ImageLike] | Tensor, preprocess: Preprocess) -> Images:
    """Images of any size and form as one batch; a tensor has to be one already, of pixels or of floats: inputs.

    Raises:
        ImageError: An image cannot be decoded.
        UsageError: Something that is no list of images, a file that cannot be read, a tensor of another shape or type,
            inputs that are not finite, or pixels where nobody said how they become inputs.
    """
    if isinstance(images, Tensor):
        return _tensor_batch(images, preprocess)
    if isinstance(images, (str, bytes, Path, Image.Image, np.ndarray)):
        raise UsageError(f"expected a list of images or a tensor, got {described(images)}; put it into a list")
    pixels = [read_image(image, preprocess) for image in images]
    return torch.from_numpy(np.stack(pixels)) if pixels else torch.empty((0, *preprocess.shape), dtype=torch.uint8)


def _tensor_batch(images: Tensor, preprocess: Preprocess) -> Images:
    """A tensor as a batch: ``uint8`` as it is, floats as float32."""
    wanted = f"(n, {', '.join(map(str, preprocess.shape))})"
    if images.shape == preprocess.shape:
        raise UsageError(f"expected a batch {wanted}, got one image {tuple(images.shape)}; add an axis, images[None]")
    if not (images.dtype == torch.uint8 or images.is_floating_point()) or images.shape[1:] != preprocess.shape:
        raise UsageError(
            f"expected uint8 pixels or float inputs of shape {wanted}, got {images.dtype} {tuple(images.shape)}"
        )
    if images.dtype == torch.uint8:
        check_known(preprocess)
        return images
    inputs = images.detach().float()
    if not bool(inputs.isfinite().all()):
        raise UsageError("expected finite inputs, got some that are NaN or infinite; mend or leave out these images")
    return inputs


def check_known(preprocess: Preprocess) -> None:
    """Reject pixels where nobody said how they become inputs, by :class:`UsageError`."""
    if not preprocess.is_known:
        raise UsageError(
            "this model does not know how pixels become inputs; give float tensors as the loader does, or fit with the "
            "mean and std of your transform: fit(…, mean=…, std=…)"
        )


def read_image(image: ImageLike, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """One image as ``uint8 (channels, height, width)``.

    Raises:
        ImageError: It cannot be decoded.
        UsageError: It is no image, its file cannot be read, or nobody said how pixels become inputs.
    """
    check_known(preprocess)
    if isinstance(image, str | Path):
        try:
            image = read_file(image)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read an image: {error}") from error
    if isinstance(image, bytes):
        return preprocess.from_bytes(image)
    if isinstance(image, np.ndarray) and is_picture(image):
        image = Image.fromarray(image)
    if isinstance(image, Image.Image):
        return preprocess.from_image(to_grey_or_rgb(image))
    remedy = "; make one batch of tensors, torch.stack(images)" if isinstance(image, Tensor) else ""
    raise UsageError(
        "expected paths, encoded images (bytes), Pillow images, or uint8 arrays (height, width) or "
        f"(height, width, 3), got {described(image)}{remedy}"
    )


def is_picture(pixels: npt.NDArray[Any]) -> bool:
    """Return whether an array is ``uint8`` (height, width) or (height, width, 3) and not empty."""
    return pixels.dtype == np.uint8 and pixels.size > 0 and (pixels.ndim == 2 or pixels.shape[2:] == (3,))


def described(image: Any) -> str:
    """Describe an image for messages."""
    if isinstance(image, np.ndarray):
        return f"an array of {image.dtype} {image.shape}"
    return f"a {type(image).__name__}"
