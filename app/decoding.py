"""Encoded uploads → one ``uint8 (n, C, H, W)`` array, in a thread pool or, for tiny requests, at once.

In the pool requests take turns: a piece of a request decodes for a few milliseconds, or one image that takes longer,
and then goes to the end of the queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from time import perf_counter
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from app.errors import ImageRefused
from app.uploads import Upload
from psc_core.errors import ImageError, ImageTooLarge

_INLINE_PIXELS: Final = 128 * 128
"""Most pixels decoded without a thread; more of them take longer than the hop."""

TURN_SECONDS: Final = 0.002
"""A piece that has decoded for so long lets others go first; handing it back to the queue costs a hundredth of it."""


class ImagePreprocess(Protocol):
    """What decoding needs of ``psc_core.images.preprocess.Preprocess``."""

    @property
    def channels(self) -> int: ...
    @property
    def height(self) -> int: ...
    @property
    def width(self) -> int: ...

    def from_bytes(self, data: bytes, *, max_pixels: int) -> npt.NDArray[np.uint8]: ...


class Decoder:
    """Decodes the images of one request into one array.

    Args:
        pool: Threads for everything that is not tiny.
        threads: How many it has; a request is cut into at most as many pieces.
        preprocess: The host half of the preprocessing; thread-safe.
        max_pixels: Largest image, pixels.
        inline_bytes: Requests of at most this many bytes are decoded at once.
    """

    def __init__(
        self,
        pool: ThreadPoolExecutor,
        *,
        threads: int,
        preprocess: ImagePreprocess,
        max_pixels: int,
        inline_bytes: int,
    ) -> None:
        self._pool = pool
        self._threads = threads
        self._preprocess = preprocess
        self._max_pixels = max_pixels
        self._inline_bytes = inline_bytes
        self.shape = (preprocess.channels, preprocess.height, preprocess.width)

    def decode_now(self, uploads: Sequence[Upload]) -> npt.NDArray[np.uint8] | None:
        """The images, if that takes no longer than handing them to a thread; else ``None``.

        Raises:
            ImageRefused: An image that cannot be used.
        """
        if sum(len(upload.data) for upload in uploads) > self._inline_bytes:
            return None
        limit = min(_INLINE_PIXELS // len(uploads), self._max_pixels)
        images = []
        for index, upload in enumerate(uploads):
            try:
                images.append(self._preprocess.from_bytes(upload.data, max_pixels=limit))
            except ImageTooLarge:
                return None
            except ImageError as error:
                raise ImageRefused(index, upload.name, error) from error
        return images[0][None] if len(images) == 1 else np.stack(images)

    def decode_later(
        self,
        uploads: Sequence[Upload],
        *,
        wanted: Callable[[], bool],
        finished: Callable[[npt.NDArray[np.uint8], Exception | None], Any],
    ) -> None:
        """Decode on the pool.

        Args:
            uploads: The images.
            wanted: Asked before each image; once it says no, the rest is skipped.
            finished: Called once, on a pool thread, with the images or the error of the first bad one
                (:class:`ImageRefused`, or whatever unexpected was raised).
        """
        images = np.empty((len(uploads), *self.shape), np.uint8)
        pieces = min(self._threads, len(uploads))
        task = _Task(pieces, lambda error: finished(images, error))
        bounds = [len(uploads) * piece // pieces for piece in range(pieces + 1)]

        def run(start: int, stop: int) -> None:
            ends = perf_counter() + TURN_SECONDS
            for index in range(start, stop):
                if index > start and perf_counter() >= ends and self._queue(run, index, stop):
                    return
                if not wanted():
                    break
                try:
                    images[index] = self._preprocess.from_bytes(uploads[index].data, max_pixels=self._max_pixels)
                except ImageError as error:
                    task.fail(index, ImageRefused(index, uploads[index].name, error))
                    break
                except Exception as error:
                    task.fail(index, error)
                    break
            task.piece_done()

        for start, stop in pairwise(bounds):
            self._pool.submit(run, start, stop)

    def _queue(self, run: Callable[[int, int], None], start: int, stop: int) -> bool:
        """Put the rest of a piece at the end of the queue; ``False`` when the pool is closed and the queue with it."""
        try:
            self._pool.submit(run, start, stop)
        except RuntimeError:
            return False
        return True


class _Task:
    """Counts the pieces of one request and keeps the error of its first bad image."""

    def __init__(self, pieces: int, finished: Callable[[Exception | None], Any]) -> None:
        self._left = pieces
        self._finished = finished
        self._errors: dict[int, Exception] = {}
        self._lock = threading.Lock()

    def fail(self, index: int, error: Exception) -> None:
        with self._lock:
            self._errors[index] = error

    def piece_done(self) -> None:
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._finished(self._errors[min(self._errors)] if self._errors else None)
