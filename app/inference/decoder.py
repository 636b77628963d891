"""Decode images to one ``uint8 (n, C, H, W)`` array, on a thread pool or, for tiny requests, at once.

Requests take turns in the pool: a chunk of a request decodes for a few milliseconds, or for one image if that takes
longer, and then goes to the end of the pool's queue.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from time import perf_counter
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from app.errors import ImageRefused, TooManyPixels
from app.inference.batcher import Images
from app.memory import MemoryBudget
from app.settings import Settings
from psc_core.errors import ImageError, ImageTooLarge
from psc_core.images.decode import open_image
from psc_core.images.preprocess import Preprocess

_COMPRESSED_TEXT: Final = (b"zTXt", b"iTXt")  # chunks of a PNG that grow a thousandfold
_MAX_INLINE_PIXELS: Final = 128 * 128  # the most pixels that are decoded sooner than they are handed to a thread
TURN_SECONDS: Final = 0.002  # the time after which another chunk gets a turn, which costs a hundredth of that


@dataclass(frozen=True, slots=True)
class EncodedImage:
    """The bytes of one image file and, if the client gave it, the file's name."""

    data: bytes
    name: str | None = None


@dataclass(frozen=True, eq=False)
class DecodedImages(Sequence[EncodedImage]):
    """The files of a request that a front has decoded too, in memory that is the request's until it is answered."""

    pixels: Images
    files: Sequence[tuple[memoryview, str | None]]  # bytes and name of each
    fingerprints: list[int]
    version: str  # of the model for which they are decoded
    began: float  # when the whole request had come, by the monotonic clock
    seconds: float  # the time in which they were decoded

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: Any) -> Any:
        """Return a copy of one file."""
        data, name = self.files[index]
        return EncodedImage(bytes(data), name)


class Decoder:
    """Decodes the images of one request into one array."""

    def __init__(
        self, pool: ThreadPoolExecutor, memory: MemoryBudget, preprocess: Preprocess, settings: Settings
    ) -> None:
        self._pool = pool  # the threads that decode every request that is not tiny
        self.memory = memory
        self._preprocess = preprocess  # the host's part of the preprocessing; thread-safe
        self.shape = preprocess.shape  # of a decoded image
        self.image_bytes = math.prod(self.shape)
        self._settings = settings

    def decode_now(self, images: Sequence[EncodedImage], into: Images | None = None) -> Images | None:
        """Decode images, perhaps into an array, if that takes no longer than handing them to a thread; or None."""
        if sum(len(image.data) for image in images) > self._settings.inline_decode_bytes:
            return None
        if any(mark in image.data for image in images for mark in _COMPRESSED_TEXT):
            return None
        limit = min(_MAX_INLINE_PIXELS // len(images), self._settings.max_pixels)
        decoded = []
        for index, image in enumerate(images):
            try:
                decoded.append(self._preprocess.from_bytes(image.data, max_pixels=limit))
            except ImageTooLarge:
                return None
            except ImageError as error:
                raise ImageRefused(index, image.name, error) from error
        return np.stack(decoded, out=into)

    def decode_later(
        self,
        images: Sequence[EncodedImage],
        into: Images | None = None,
        *,
        is_wanted: Callable[[], bool],
        on_done: Callable[[npt.NDArray[np.uint8], Exception | None], Any],
    ) -> None:
        """Decode images on the pool, perhaps into an array, while ``is_wanted()``.

        ``on_done`` is called once, on a pool thread, with the images and the error of the first bad one, or None.
        """
        decoded = np.empty((len(images), *self.shape), np.uint8) if into is None else into
        settings, chunks = self._settings, min(self._settings.decoders, len(images))
        most, lock, errors = settings.max_pixels_per_request, threading.Lock(), dict[int, Exception]()
        left, pixels = chunks, 0  # the chunks that are not done, and the pixels of the images so far

        def run(start: int, stop: int) -> None:
            nonlocal left, pixels
            turn_ends = perf_counter() + TURN_SECONDS
            for index in range(start, stop):
                if index > start and perf_counter() >= turn_ends:
                    with suppress(RuntimeError):  # The pool is closed, so this thread decodes the rest.
                        self._pool.submit(run, index, stop)
                        return
                if not is_wanted() or pixels > most:
                    break
                try:
                    image = open_image(images[index].data, max_pixels=settings.max_pixels)
                    with lock:
                        pixels += image.cost
                    if pixels > most:
                        raise TooManyPixels(
                            f"expected images of at most {most} pixels in all (the setting max_pixels_per_request), "
                            "got more; split the request or send smaller images"
                        )
                    with self.memory.decoding(image.memory_bytes(self._preprocess.mode)):
                        decoded[index] = self._preprocess.from_file(image)
                except ImageError as error:
                    errors[index] = ImageRefused(index, images[index].name, error)
                    break
                except Exception as error:
                    errors[index] = error
                    break
            with lock:
                left -= 1
                is_done = left == 0
            if is_done:
                on_done(decoded, errors[min(errors)] if errors else None)

        for start, stop in pairwise(len(images) * chunk // chunks for chunk in range(chunks + 1)):
            self._pool.submit(run, start, stop)


# The most bytes that are hashed on the event loop, in less than a millisecond; more are hashed on a thread.
_AT_ONCE: Final = 1 << 20


async def fingerprints(images: Sequence[EncodedImage] | Images) -> list[int]:
    """Return a 64-bit hash of each image's file, or of its pixels.

    ``hash`` of bytes is SipHash with a key that Python draws when it starts: ten times as fast as a cryptographic hash,
    and nobody outside can construct two images with the same hash.
    """
    if isinstance(images, DecodedImages):
        return images.fingerprints
    # map() is lazy: the bytes are read only where the list is made, perhaps on a thread.
    if isinstance(images, np.ndarray):
        size, hashes = images.nbytes, map(hash, map(np.ndarray.tobytes, images))
    else:
        files = [image.data for image in images]
        size, hashes = sum(map(len, files)), map(hash, files)
    return await asyncio.to_thread(list, hashes) if size > _AT_ONCE else list(hashes)
