"""Any bytes are an upright grey or RGB image within the limit of pixels, or one of the three errors of an image."""

from __future__ import annotations

import io
from typing import Final

from PIL import Image

from psc_core.errors import ImageError
from psc_core.images.decode import IMAGE_FORMATS, decode_image, mute_codecs

MAX_PIXELS: Final = 1 << 16
MAX_TEXT: Final = 500

mute_codecs()


def _encoded(kind: str, mode: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((9, 7)).convert(mode).save(buffer, kind, **options)
    return buffer.getvalue()


SEEDS: Final = [
    *(_encoded(kind, "L") for kind in IMAGE_FORMATS),
    *(_encoded("TIFF", "RGB", compression=name) for name in ("tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg")),
    *(_encoded("PNG", mode) for mode in ("1", "P", "LA", "RGBA", "I;16")),
    _encoded("JPEG", "CMYK", progressive=True),
    _encoded("TIFF", "F"),
    _encoded("GIF", "P", transparency=0),
]


def check(data: bytes) -> None:
    """Decode."""
    try:
        image = decode_image(data, max_pixels=MAX_PIXELS)
    except ImageError as error:
        assert len(str(error)) <= MAX_TEXT, str(error)
        return
    assert image.mode in ("L", "RGB"), image.mode
    assert 0 < image.width * image.height <= MAX_PIXELS, image.size
