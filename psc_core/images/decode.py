"""Decode an image file after checking every limit on it.

Fitting, evaluation and the service share this decoder, so calibrated thresholds hold for served images.  It uses
Pillow, or for plain JPEGs :mod:`psc_core.images.turbo`, which gives the same pixels.  An image of more than
``max_pixels``, or one that would cost far more than its pixels (:mod:`psc_core.images.limits`), is rejected by its
header, so a decompression bomb costs no more than its header.
"""

from __future__ import annotations

import contextlib
import ctypes
import warnings
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from psc_core.errors import ImageError, ImageTooLarge, UndecodableImage, UnsupportedImage
from psc_core.images.limits import DEFAULT_MAX_PIXELS, MAX_EXIF_BYTES, check_file, check_limit, check_pixels
from psc_core.images.turbo import decode_plain
from psc_core.images.unread import CONVERT, other_format, unread_kind

IMAGE_FORMATS: Final = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF")
"""The supported formats; any other raises :class:`UnsupportedImage`."""

_RUN_LENGTH_COST: Final = 50
"""The cost of a pixel of a run-length encoded BMP in pixels of other images, because Pillow decodes it in Python."""

_RUN_BYTES: Final = 4
"""Maximum number of bytes of a run-length encoded BMP per pixel; two suffice, but some commands draw no pixel."""

_HEADER: Final = 1 << 16

_SIGNATURES: Final = (b"\xff\xd8\xff", b"\x89PNG", b"BM", b"GIF8", b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
"""The first bytes of the formats, to tell a damaged image from a file of another type."""

_BLOCK: Final = 1 << 18
"""Maximum number of samples converted to float64 at a time."""

_WIDE_MODES: Final = frozenset({"I;16", "I;16B", "I;16L", "I;16N", "I", "F"})


@dataclass(frozen=True)
class OpenImage:
    """An image file whose header has been checked and whose pixels are not decoded yet."""

    image: Image.Image  # the image as Pillow opened it
    data: bytes  # the content of the file
    cost: int  # the number of pixels; each pixel of a run-length encoded BMP counts as 50

    def samples(self, mode: str) -> npt.NDArray[np.uint8] | None:
        """Return the samples of the decoded image if simplejpeg can decode it, else None; see :func:`decode_plain`."""
        return decode_plain(self.image, self.data, mode)

    def decode(self) -> Image.Image:
        """Decode the first frame, upright; may be called once.  See :func:`decode_image`."""
        image = self.image
        with image:
            width, height = image.size
            try:
                image.load()
                return to_grey_or_rgb(image)
            except ImageError:
                raise
            except Exception as error:
                if kind := unread_kind(self.data, is_open=True):
                    raise UnsupportedImage(f"{kind} is not read; {CONVERT}") from error
                raise UndecodableImage(
                    f"data of this {width}×{height} {image.format} image is damaged or truncated "
                    f"({type(error).__name__}); use an intact copy"
                ) from error


def open_image(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> OpenImage:
    """Open an encoded image by reading its header; see :func:`decode_image` for the errors."""
    try:
        image = Image.open(check_file(data, max_pixels), formats=IMAGE_FORMATS)
    except ImageError:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"image is larger than {max_pixels} pixels ({error}); use a smaller image") from error
    except Exception as error:
        if kind := unread_kind(data):
            raise UnsupportedImage(f"{kind} is not read; {CONVERT}") from error
        if data.startswith(_SIGNATURES) or data[8:12] == b"WEBP":
            raise UndecodableImage("image header is damaged or truncated; use an intact copy") from error
        raise UnsupportedImage(f"expected one of {', '.join(IMAGE_FORMATS)}, got {other_format(data)}") from error
    width, height = image.size
    run_length = any(tile.codec_name == "bmp_rle" for tile in image.tile)
    cost = width * height * (_RUN_LENGTH_COST if run_length else 1)
    check_pixels(width, height, max_pixels // _RUN_LENGTH_COST if run_length else max_pixels)
    if run_length:
        check_limit("bytes of run-length code for these pixels", _RUN_BYTES * width * height + _HEADER, len(data))
    return OpenImage(image, data, cost)


def decode_image(data: bytes, *, max_pixels: int = DEFAULT_MAX_PIXELS) -> Image.Image:
    """Decode the first frame of an encoded image of at most ``max_pixels``, upright.

    Returns:
        An image of mode ``"L"`` or ``"RGB"``, with EXIF orientation applied, alpha blended onto black, palette
        and CMYK converted, and 16-bit samples scaled to 8 bits.

    Raises:
        UnsupportedImage: If the file is in none of :data:`IMAGE_FORMATS`, or of a kind that is not read.
        ImageTooLarge: If the header declares more than ``max_pixels``.
        UndecodableImage: If the file is damaged or truncated, has non-finite samples, or would cost far more to decode
            than its pixels.
    """
    return open_image(data, max_pixels=max_pixels).decode()


def to_grey_or_rgb(image: Image.Image) -> Image.Image:
    """Convert any Pillow image to ``L`` or ``RGB`` with 8-bit samples, upright, with alpha blended onto black.

    Raises:
        UndecodableImage: If the image has too much EXIF or non-finite samples.
    """
    exif = max(len(image.info.get("exif") or b""), len(image.info.get("Raw profile type exif") or "") // 2)
    check_limit("bytes of EXIF", MAX_EXIF_BYTES, exif)
    image = ImageOps.exif_transpose(image)
    if image.mode in _WIDE_MODES:
        samples = np.asarray(image)
        if image.mode == "F" and not np.isfinite([samples.min(initial=0.0), samples.max(initial=0.0)]).all():
            raise UndecodableImage("expected finite samples, got NaN or infinity; replace them")
        scale = 255.0 if image.mode == "F" and samples.max(initial=0.0) <= 1.0 else 255.0 / 65535.0
        narrow = np.empty(samples.shape, np.uint8)
        rows = max(1, _BLOCK // max(1, samples.shape[1]))
        for start in range(0, len(samples), rows):
            part = slice(start, start + rows)
            narrow[part] = np.clip(np.rint(samples[part] * np.float64(scale)), 0, 255)
        return Image.fromarray(narrow)
    if image.mode in ("1", "L", "RGB") and "transparency" not in image.info:
        return image.convert("L") if image.mode == "1" else image
    if image.mode in ("LA", "La", "RGBA", "RGBa", "PA") or "transparency" in image.info:
        image = image.convert("LA" if image.mode in ("LA", "La") else "RGBA")
        black = Image.new(image.mode.removesuffix("A"), image.size)
        black.paste(image, mask=image.getchannel("A"))
        return black
    return image.convert("RGB")


def mute_codecs() -> None:
    """Keep libtiff and Pillow from writing about damaged files to standard error, in the whole process.

    The caller gets :class:`UndecodableImage` instead.  Python would also remember every distinct warning, and a file
    decides the text of its warning.
    """
    warnings.filterwarnings("ignore", module=r"PIL\.")
    with contextlib.suppress(AttributeError):  # Pillow may be built without libtiff.
        ctypes.CDLL(Image.core.__file__).TIFFSetErrorHandler(None)  # type: ignore[attr-defined]
