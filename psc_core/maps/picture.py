"""A map as a picture, and its most anomalous region."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from psc_core.images.png import as_base64, png_of

Grey = npt.NDArray[np.uint8]
"""The grey levels (rows, columns) of a map; brighter is more anomalous."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as fractions of the width and height of the network's input."""

_CORNERS: Final = np.ones((3, 3), bool)


def box_of(grey: Grey) -> Box:
    """Return the box of the most anomalous region.

    A region is a connected set, corners included, of positions at least half as bright as the brightest.  The one with
    the largest sum of grey levels is taken, on a tie the first.  The box of a black map is the whole image.
    """
    regions, _ = ndimage.label(2 * grey.astype(np.int64) >= int(grey.max()), _CORNERS)
    sums = np.bincount(regions.ravel(), weights=grey.ravel())
    region = int(sums[1:].argmax()) + 1
    rows, columns = ndimage.find_objects(regions)[region - 1]
    height, width = grey.shape
    return columns.start / width, rows.start / height, columns.stop / width, rows.stop / height


def map_document(layer: str, grey: Grey) -> dict[str, Any]:
    """Return the map of one image as the member :class:`psc_core.tasks.answer.ExplanationMap` of an answer."""
    return {"layer": layer, "png": as_base64(png_of(grey)), "box": box_of(grey)}
