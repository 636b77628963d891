"""Estimate how long batches take on the device, from measured times.

Times are kept by batch size, because a batch of one image says little about the time for 64.
"""

from __future__ import annotations

import math
from typing import Final

_SMOOTHING: Final = 0.2
"""The weight of the newest time in the running mean for its batch size."""


class BatchTimes:
    """Running means of batch times; a batch larger than any measured one is taken to last as long as the largest.

    Args:
        max_batch: The maximum number of images in a batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._means: list[float | None] = [None] * (_size_class(max_batch) + 1)
        self._last_end = -math.inf

    def add(self, size: int, taken_at: float, now: float) -> None:
        """Record a batch that was taken from the queue at ``taken_at`` and is done now."""
        # With two slots a batch is taken while the device still works on the one before it: that wait does not count.
        seconds = max(now - max(taken_at, self._last_end), 1e-9)
        size_class = _size_class(size)
        mean = self._means[size_class]
        self._means[size_class] = seconds if mean is None else mean + _SMOOTHING * (seconds - mean)
        self._last_end = now

    def total(self, images: int) -> float:
        """Return the least time that this many images take, seconds; 0 before the first batch."""
        full, rest = divmod(images, self._max_batch)
        return full * self._seconds(self._max_batch) + (self._seconds(rest) if rest else 0.0)

    @property
    def fixed(self) -> float:
        """The part of a batch's time that does not grow with its images, seconds.

        It is the intercept of the line through the smallest and the largest measured size.
        """
        known = [(min(1 << index, self._max_batch), seconds) for index, seconds in enumerate(self._means) if seconds]
        if len(known) < 2:
            return 0.0
        (few, quick), (many, slow) = known[0], known[-1]
        return max(0.0, (many * quick - few * slow) / (many - few))

    def _seconds(self, size: int) -> float:
        """Return the time of a batch: that of its size class, else a fraction of a larger one's, else the largest's."""
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
    """Return the class of a batch size: 1, 2, 3–4, 5–8, … images."""
    return (size - 1).bit_length()
