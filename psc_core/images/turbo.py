"""Decode plain JPEGs with simplejpeg (extra ``psc[fast]``), which gives Pillow's pixels in less time.

Pillow has already read the header, and every limit has been checked.  simplejpeg decodes strictly and leaves to Pillow
any file that libjpeg would warn about, so the errors are always Pillow's.  Each library brings its own libjpeg-turbo;
if the two versions differ in a pixel of a trial image, simplejpeg is not used.
"""

from __future__ import annotations

import io
import logging
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image

HAS_SIMPLEJPEG: Final = find_spec("simplejpeg") is not None

FORMS: Final = {"RGB": "RGBX", "L": "GRAY"}
"""simplejpeg's name for the samples of each mode: four bytes per RGB pixel, as Pillow stores it."""

_TRIALS: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("L", {}),
    ("RGB", {"subsampling": "4:2:0"}),
    ("RGB", {"subsampling": "4:2:2", "progressive": True}),
)

logger = logging.getLogger("psc.images")


def decode_plain(image: Image.Image, data: bytes, mode: str) -> npt.NDArray[np.uint8] | None:
    """Decode an upright, undamaged JPEG to ``uint8 (height, width, 4 for RGB or 1)``; ignore RGB's fourth sample.

    Args:
        image: The image as Pillow opened it, with its pixels not decoded yet.
        data: The content of the file.
        mode: ``"L"`` or ``"RGB"``.

    Returns:
        The samples, or ``None`` if Pillow has to decode: another format or mode, a damaged file, no simplejpeg.
    """
    if not HAS_SIMPLEJPEG or image.format != "JPEG" or image.mode != mode or not _agrees():
        return None
    try:
        if image.getexif().get(ExifTags.Base.Orientation, 1) != 1:
            return None
        return _decode(data, mode)
    except Exception:  # Pillow decides what is wrong with the file, if anything
        return None


def _decode(data: bytes, mode: str) -> npt.NDArray[np.uint8]:
    import simplejpeg

    samples: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, FORMS[mode], strict=True)
    return samples


@cache
def _agrees() -> bool:
    """Return whether simplejpeg decodes the trial images as Pillow does."""
    # Odd sides, because libjpeg versions may differ in the padding of blocks and of subsampled colours.
    noise = np.random.default_rng(0).integers(0, 256, (67, 93, 3)).astype(np.uint8)
    for mode, options in _TRIALS:
        file = io.BytesIO()
        Image.fromarray(noise).convert(mode).save(file, "JPEG", quality=80, **options)
        expected = np.atleast_3d(np.asarray(Image.open(file)))
        try:
            agrees = np.array_equal(_decode(file.getvalue(), mode)[..., : expected.shape[2]], expected)
        except Exception as error:
            logger.warning("simplejpeg cannot be used, so Pillow is: %s: %s", type(error).__name__, error)
            return False
        if not agrees:
            logger.warning(
                "simplejpeg and Pillow decode different pixels, so Pillow is used; install other versions of both"
            )
            return False
    return True
