"""Images that come again count once: a retry, a health probe or a demonstration is no news of the stream.

The drift test and the rates of scores are about images that are exchangeable with the calibration images.  One image
that is sent eight times is not eight of them.

**Why leaving repeats out is sound.**  Let the images without their repeats, in the order of their first appearance, be
exchangeable with the calibration images.  Leaving repeats out gives back exactly these, whoever repeats what and when,
so a test on them keeps its level.

**Where it would not be.**  Identical images can be part of the data: blank pages, masked tiles.  Then some calibration
images are identical too and have equal scores, and a stream without repeats would look too strange.  So a repeat that
falls on equal calibration scores counts as often as it comes.  What is not twice among n calibration images is of a
frequency of about 1/n, and its repeats are too few to matter.

**What nobody can do with it.**  A repeat is an image that has been counted, so sending an image first does not hide the
one who sends it next.  Fingerprints have 64 bits, under a key that each process draws.

**Memory.**  The last :data:`REMEMBERED` different images, about 200 bytes each.  An image of which as many others came
since the last time counts again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

REMEMBERED: Final = 10_000
"""Different images whose fingerprints a monitor keeps."""


class RepeatFilter:
    """Tells images that count from repeats.

    Args:
        calibration_scores: OOD scores of the n calibration images, in any order.
        remembered: Different images that it remembers.
    """

    def __init__(self, calibration_scores: npt.ArrayLike, *, remembered: int = REMEMBERED) -> None:
        scores = np.sort(np.asarray(calibration_scores))[::-1]
        equal = scores[1:] == scores[:-1]
        tied = np.zeros(len(scores), bool)
        tied[1:] |= equal
        tied[:-1] |= equal
        # By how many calibration scores are no smaller than an image's: whether it lies beside equal ones.  On either
        # side, because rounding differs a little between batches of different sizes.
        self._is_common = np.concatenate([[False], tied]) | np.concatenate([tied, [False]])
        self._remembered = remembered
        self._recent: OrderedDict[int, None] = OrderedDict()

    def counts(self, p_values: npt.NDArray[np.floating[Any]], fingerprints: Iterable[int]) -> npt.NDArray[np.bool_]:
        """Return whether each image counts, in the order in which they came.

        Args:
            p_values: Served p-values, shape (images,).
            fingerprints: Equal for identical images.
        """
        is_new = np.array([self._see(fingerprint) for fingerprint in fingerprints], bool)
        n = len(self._is_common) - 1
        cells = np.rint(np.asarray(p_values, np.float64) * (n + 1)).astype(np.int64) - 1
        counted: npt.NDArray[np.bool_] = is_new | self._is_common[cells.clip(0, n)]
        return counted

    def _see(self, fingerprint: int) -> bool:
        """Remember an image as the last one; whether it was not remembered."""
        is_new = fingerprint not in self._recent
        self._recent[fingerprint] = None
        self._recent.move_to_end(fingerprint)
        if len(self._recent) > self._remembered:
            self._recent.popitem(last=False)
        return is_new
