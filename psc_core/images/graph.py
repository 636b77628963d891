"""Resizing and cropping as :class:`.Preprocess` does them, in matrix products, which every runtime of ONNX has.

ONNX's own ``Resize`` does not serve: with ``antialias`` OpenVINO computes something else, by up to 120 of 255 levels,
and ONNX Runtime's is off by up to 9.  A row of the result is a weighted mean of rows of the image, so that

    pixels = V · image · Hᵀ,   weight ∝ f((x + ½ − (i + ½) · scale) / max(scale, 1))

with one matrix for each axis.  As in Pillow and PyTorch, the rows are done first and rounded to whole levels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from psc_core.images.preprocess import Preprocess

_SHARPNESS = -0.5  # of the bicubic filter, as in Pillow; Keys (1981) calls it a


class Resize(nn.Module):
    """The host half of a preprocessing for decoded images of any size; one batch has one size.

    While a graph is made, sizes are symbols of PyTorch, of which types and shapes say nothing.
    """

    def __init__(self, preprocess: Preprocess) -> None:
        super().__init__()
        self.preprocess = preprocess

    def forward(self, images: Tensor) -> Tensor:
        """Return pixels (n, channels, height, width), whole levels as floats, of images (n, h, w, channels)."""
        height, width = images.shape[1:3]
        planes = images.permute(0, 3, 1, 2).float()
        shorter: Any = torch.sym_min(height, width)
        size = self.preprocess.resize
        across = self.preprocess.width if size is None else size * width // shorter
        down = self.preprocess.height if size is None else size * height // shorter
        planes = _whole(planes @ self._weights(width, across, self.preprocess.width).T)
        return _whole(self._weights(height, down, self.preprocess.height) @ planes)

    def _weights(self, size: Any, resized: Any, cropped: int) -> Tensor:
        """Return the weight of each of ``size`` pixels in each of ``resized`` ones, those of the central crop only."""
        scale = size / resized
        centres = (torch.arange(cropped) + self.preprocess.offset(resized - cropped) + 0.5) * scale
        wide: Any = torch.sym_max(scale, 1.0)
        distance: Tensor = ((torch.arange(size) + 0.5 - centres[:, None]) / wide).abs()
        weights = (1 - distance).relu()
        if self.preprocess.interpolation == "bicubic":
            a, near, far = _SHARPNESS, distance.clamp(max=1), distance.clamp(1, 2)
            weights = ((a + 2) * near - (a + 3)) * near * near + 1 + a * (((far - 5) * far + 8) * far - 4)
        return weights / weights.sum(dim=1, keepdim=True)


def _whole(levels: Tensor) -> Tensor:
    return (levels + 0.5).floor().clamp(0, 255)
