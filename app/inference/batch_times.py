"""Estimate how long batches take on the device, from measured times.

Times are kept by batch size, because a batch of one image says little about the time for 64.  This module has no clock.
"""

from __future__ import annotations

from typing import Final

_SMOOTHING: Final = 0.2
"""The weight of the newest value in a running mean."""


class RunningMean:
    """A mean in which newer values weigh more.

    Attributes:
        value: The mean; None before the first value.
    """

    value: float | None = None

    def add(self, value: float) -> None:
        """Update the mean with a new value."""
        self.value = value if self.value is None else self.value + _SMOOTHING * (value - self.value)


class BatchTimes:
    """Running means of the times of batches of one mode.

    A batch larger than any measured one is taken to last as long as the largest.

    Args:
        max_batch: The maximum number of images in a batch.
    """

    def __init__(self, max_batch: int) -> None:
        self._max_batch = max_batch
        self._means = [RunningMean() for _ in range(_size_class(max_batch) + 1)]

    def add(self, size: int, seconds: float) -> None:
        """Record a batch of ``size`` images that the device has computed in ``seconds``."""
        self._means[_size_class(size)].add(seconds)

    def total(self, images: int) -> float:
        """Return the least time that this many images take, seconds; 0 before the first batch."""
        full, rest = divmod(images, self._max_batch)
        return (full * self._seconds(self._max_batch) if full else 0.0) + (self._seconds(rest) if rest else 0.0)

    @property
    def fixed(self) -> float:
        """The part of a batch's time that does not grow with its images, seconds.

        It is the intercept of the line through the smallest and the largest measured size.
        """
        sizes = (min(1 << index, self._max_batch) for index in range(len(self._means)))
        known = [(size, mean.value) for size, mean in zip(sizes, self._means, strict=True) if mean.value is not None]
        if len(known) < 2:
            return 0.0
        (few, quick), (many, slow) = known[0], known[-1]
        return max(0.0, (many * quick - few * slow) / (many - few))

    def _seconds(self, size: int) -> float:
        """Return the time of a batch: that of its size class, else a fraction of a larger one's, else the largest's."""
        smallest = _size_class(size)
        for larger in range(smallest, len(self._means)):
            seconds = self._means[larger].value
            if seconds is not None:
                return seconds if larger == smallest else seconds * size / min(1 << larger, self._max_batch)
        return next((mean.value for mean in reversed(self._means) if mean.value is not None), 0.0)


def _size_class(size: int) -> int:
    """Return the class of a batch size: 1, 2, 3–4, 5–8, … images."""
    return (size - 1).bit_length()
