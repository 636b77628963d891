"""Compute fingerprints of images, which are equal for identical bytes and mean nothing outside this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import numpy as np

from app.inference.decoder import EncodedImage
from app.inference.request import Images

_AT_ONCE: Final = 1 << 20
"""The most bytes that are hashed on the event loop, in less than a millisecond; more are hashed on a thread."""


async def fingerprints(images: Sequence[EncodedImage] | Images) -> list[int]:
    """Return a 64-bit hash of each image's file, or of its pixels.

    ``hash`` of bytes is SipHash with a key that Python draws when it starts: ten times as fast as a cryptographic hash,
    and nobody outside can construct two images with the same hash.
    """
    # map() is lazy: the bytes are read only where the list is made, perhaps on a thread.
    if isinstance(images, np.ndarray):
        size, hashes = images.nbytes, map(hash, map(np.ndarray.tobytes, images))
    else:
        files = [image.data for image in images]
        size, hashes = sum(map(len, files)), map(hash, files)
    return await asyncio.to_thread(list, hashes) if size > _AT_ONCE else list(hashes)
