"""The times that batches take on the device, as measured.

Times are kept by batch size, because batches of one image say little about what 64 take.
"""

from __future__ import annotations

import math
from typing import Final

_SMOOTHING: Final = 0.2
"""Weight of the newest time in the running mean for its size."""


class BatchTimes:
    """Running means of batch times; a batch larger than any measured counts as the largest measured.

    Args:
        max_batch: Maximum number of images in a batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._means: list[float | None] = [None] * (_size_class(max_batch) + 1)
        self._last_end = -math.inf

    def add(self, size: int, taken_at: float, now: float) -> None:
        """Record a batch that was taken at ``taken_at``, behind the batch before it, and is done now."""
        seconds = max(now - max(taken_at, self._last_end), 1e-9)
        kind = _size_class(size)
        mean = self._means[kind]
        self._means[kind] = seconds if mean is None else mean + _SMOOTHING * (seconds - mean)
        self._last_end = now

    def total(self, images: int) -> float:
        """Least seconds that so many images take; 0 before the first batch."""
        full, rest = divmod(images, self._max_batch)
        return full * self._seconds(self._max_batch) + (self._seconds(rest) if rest else 0.0)

    @property
    def fixed(self) -> float:
        """Seconds of a batch that do not grow with its images, by the smallest and the largest size measured."""
        known = [(min(1 << kind, self._max_batch), seconds) for kind, seconds in enumerate(self._means) if seconds]
        if len(known) < 2:
            return 0.0
        (few, quick), (many, slow) = known[0], known[-1]
        return max(0.0, (many * quick - few * slow) / (many - few))

    def _seconds(self, size: int) -> float:
        """Time of a batch: measured at about this size, else its fraction of a larger one, else as the largest."""
        smallest = _size_class(size)
        for larger in range(smallest, len(self._means)):
            seconds = self._means[larger]
            if seconds is not None:
                return seconds if larger == smallest else seconds * size / min(1 << larger, self._max_batch)
        for seconds in reversed(self._means):
            if seconds is not None:
                return seconds
        return 0.0


def _size_class(size: int) -> int:
    """Sizes of 1, 2, 3–4, 5–8, … images count as alike."""
    return (size - 1).bit_length()
