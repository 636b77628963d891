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
    size = images.nbytes if isinstance(images, np.ndarray) else sum(len(image.data) for image in images)
    if size <= _AT_ONCE:
        return _hashes(images)
    return await asyncio.to_thread(_hashes, images)


def _hashes(images: Sequence[EncodedImage] | Images) -> list[int]:
    if isinstance(images, np.ndarray):
        return [hash(image.tobytes()) for image in images]
    return [hash(image.data) for image in images]
