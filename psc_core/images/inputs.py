"""Read images, in whatever form users have them, into the network's pixels; float inputs of a loader stay unchanged."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
from psc_core.images.preprocess import MAKE_KNOWN, Images, Preprocess

ImageLike = str | Path | bytes | Image.Image | npt.NDArray[Any]
"""One image: a path, an encoded file, a Pillow image, or ``uint8`` pixels (height, width) or (height, width, 3)."""


def as_batch(images: Sequence[ImageLike] | Tensor, preprocess: Preprocess) -> Images:
    """Read images of any size and form into one batch; a tensor must be a batch already, of pixels or float inputs.

    Raises:
        ImageError: If an image cannot be decoded.
        UsageError: If ``images`` is not a list of images, a file cannot be read, a tensor has the wrong shape, dtype or
            non-finite values, or the preprocessing from pixels to inputs is unknown.
    """
    if isinstance(images, Tensor):
        return _tensor_batch(images, preprocess)
    if isinstance(images, (str, bytes, Path, Image.Image, np.ndarray)):
        raise UsageError(f"expected a list of images or a tensor, got {described(images)}; put it into a list")
    if not isinstance(images, Iterable):
        raise UsageError(f"expected a list of images or a tensor, got {described(images)}")
    pixels = [read_image(image, preprocess) for image in images]
    return torch.from_numpy(np.stack(pixels)) if pixels else torch.empty((0, *preprocess.shape), dtype=torch.uint8)


def _tensor_batch(images: Tensor, preprocess: Preprocess) -> Images:
    """Return a tensor as a batch: ``uint8`` unchanged, floats as float32."""
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
        raise UsageError("expected finite inputs, got some that are NaN or infinite; correct or leave out these images")
    return inputs


def check_known(preprocess: Preprocess) -> None:
    """Raise :class:`UsageError` if the preprocessing from pixels to inputs is unknown."""
    if not preprocess.is_known:
        raise UsageError(
            "this model does not know how pixels become inputs; give float tensors as the loader does, or " + MAKE_KNOWN
        )


def read_image(image: ImageLike, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    """Read one image as ``uint8 (channels, height, width)``.

    Raises:
        ImageError: If the image cannot be decoded.
        UsageError: If it is not an image, its file cannot be read, or the preprocessing is unknown.
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
        return preprocess.from_image(to_grey_or_rgb(image, preprocess.background))
    remedy = "; make one batch of tensors, torch.stack(images)" if isinstance(image, Tensor) else ""
    if isinstance(image, np.ndarray) and image.dtype != np.uint8 and image.dtype.kind in "bfiu":
        remedy = "; scale its samples to 0 … 255, which only you know how, and convert them to uint8"
    raise UsageError(
        "expected paths, encoded images (bytes), Pillow images, or uint8 arrays (height, width) or "
        f"(height, width, 3), got {described(image)}{remedy}"
    )


def is_picture(pixels: npt.NDArray[Any]) -> bool:
    """Return whether an array is ``uint8`` (height, width) or (height, width, 3) and not empty."""
    return pixels.dtype == np.uint8 and pixels.size > 0 and (pixels.ndim == 2 or pixels.shape[2:] == (3,))


def described(image: Any) -> str:
    """Describe an object that was given as an image, for an error message."""
    if isinstance(image, np.ndarray):
        return f"an array of {image.dtype} {image.shape}"
    return "None" if image is None else f"a {type(image).__name__}"
