"""Fingerprints of images: equal for identical bytes, and of no meaning outside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from app.inference.decoder import EncodedImage
from app.inference.request import Images

_AT_ONCE: Final = 1 << 20
"""Bytes that take less than a millisecond; more are read on a thread, for the event loop to have its turn between."""


async def fingerprints(images: Sequence[EncodedImage] | Images) -> list[int]:
    """Return a 64-bit number of each image's bytes: those of its file, or of its pixels.

    ``hash`` of bytes is SipHash under a key that Python draws at its start: ten times as fast as a cryptographic one,
    and nobody outside can make two images that share theirs.
    """
    if isinstance(images, np.ndarray):
        size, hashes = images.nbytes, map(hash, map(np.ndarray.tobytes, images))  # Read where the list is made.
    else:
        files = [image.data for image in images]
        size, hashes = sum(map(len, files)), map(hash, files)
    return await asyncio.to_thread(list, hashes) if size > _AT_ONCE else list(hashes)
