"""Count repeated images once: a retry, a health probe or a demonstration says nothing new about the stream.

The drift test and the rates of scores are about images that are exchangeable with the calibration images.  One image
that is sent eight times is not eight such images.

**Why leaving out repeats is sound.**  Suppose that the images without their repeats, in the order of their first
appearance, are exchangeable with the calibration images.  Leaving out repeats recovers exactly these images, whoever
repeats what and when, so a test on them keeps its level.

**Where it would not be sound.**  Identical images can be part of the data: blank pages, masked tiles.  Then some
calibration images are identical too and have equal scores, and a stream without repeats would look too unusual.  So a
repeat whose score lies at equal calibration scores counts every time.  An image that does not occur twice among n
calibration images has a frequency of about 1/n, and its repeats are too few to matter.

**Why it cannot be abused.**  A repeat is an image that has been counted, so nobody can hide an image by sending it
first.  Fingerprints have 64 bits, and each process draws the key of its own.

**Memory.**  The last :data:`REMEMBERED` different images are kept, about 200 bytes each.  An image counts again if as
many others have come since it was last seen.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

REMEMBERED: Final = 10_000
"""The number of different images whose fingerprints a monitor keeps."""


class RepeatFilter:
    """Tells repeats from images that count.

    Args:
        is_common: Whether an image lies beside equal calibration scores, by the number of calibration scores that are
            no smaller than its own, shape (n + 1,).
        remembered: The number of different images to remember.
    """

    def __init__(self, is_common: npt.NDArray[np.bool_], remembered: int) -> None:
        self._is_common = is_common
        self._remembered = remembered
        self._recent: OrderedDict[int, None] = OrderedDict()

    @classmethod
    def of(cls, calibration_scores: npt.ArrayLike, *, remembered: int = REMEMBERED) -> RepeatFilter:
        """Make the filter for the OOD scores of n calibration images, in any order."""
        scores = np.sort(np.asarray(calibration_scores))[::-1]
        equal = scores[1:] == scores[:-1]
        tied = np.zeros(len(scores), bool)
        tied[1:] |= equal
        tied[:-1] |= equal
        # Either side counts, because rounding differs a little between batches of different sizes.
        return cls(np.concatenate([[False], tied]) | np.concatenate([tied, [False]]), remembered)

    def counts(self, p_values: npt.NDArray[np.floating[Any]], fingerprints: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return whether each image counts, a boolean array of shape (images,).

        Args:
            p_values: The served p-values in the order of arrival, shape (images,).
            fingerprints: The images' fingerprints, equal for identical images.
        """
        is_new = np.array([self._see(fingerprint) for fingerprint in fingerprints], bool)
        n = len(self._is_common) - 1
        cells = np.rint(np.asarray(p_values, np.float64) * (n + 1)).astype(np.int64) - 1
        counted: npt.NDArray[np.bool_] = is_new | self._is_common[cells.clip(0, n)]
        return counted

    def _see(self, fingerprint: int) -> bool:
        """Remember an image as the latest one; return whether it is new."""
        is_new = fingerprint not in self._recent
        self._recent[fingerprint] = None
        self._recent.move_to_end(fingerprint)
        if len(self._recent) > self._remembered:
            self._recent.popitem(last=False)
        return is_new
