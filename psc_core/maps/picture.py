"""A map as a picture, and the strangest region in it."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from psc_core.images.png import as_base64, png_of

Grey = npt.NDArray[np.uint8]
"""(rows, columns), brighter is stranger."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom as fractions of the width and height of what the network sees."""

_CORNERS: Final = np.ones((3, 3), bool)


def box_of(grey: Grey) -> Box:
    """Return the box of the strangest region.

    A region is what hangs together, corners included, of the positions at least half as bright as the brightest; the
    strangest has the largest sum of grey levels, of equal ones the first.  Of a black map it is the whole.
    """
    regions, _ = ndimage.label(2 * grey.astype(np.int64) >= int(grey.max()), _CORNERS)
    sums = np.bincount(regions.ravel(), weights=grey.ravel())
    strangest = int(sums[1:].argmax()) + 1
    rows, columns = ndimage.find_objects(regions)[strangest - 1]
    height, width = grey.shape
    return columns.start / width, rows.start / height, columns.stop / width, rows.stop / height


def map_document(layer: str, grey: Grey) -> dict[str, Any]:
    """Return the map of one image as an answer has it, :class:`psc_core.tasks.answer.ExplanationMap`."""
    return {"layer": layer, "png": as_base64(png_of(grey)), "box": box_of(grey)}
