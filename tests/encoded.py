"""Images as files."""

import io
from typing import Any

import numpy as np
from PIL import Image


def encode(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of a file of an image, or of the array of one."""
    buffer = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))).save(buffer, kind, **options)
    return buffer.getvalue()
