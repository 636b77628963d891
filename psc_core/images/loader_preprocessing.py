"""The preprocessing behind the inputs of a loader, as a caller states it: as a whole, by mean and deviation, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy.typing as npt
import torch
from torch import Tensor

from psc_core.errors import UsageError
from psc_core.images.preprocess import Preprocess, mode_of
from psc_core.images.transforms import as_preprocess

Statistic = float | Sequence[float] | Tensor | npt.NDArray[Any]
"""The mean or the standard deviation of each channel, or one number for all channels."""


@dataclass(frozen=True)
class LoaderPreprocessing:
    """A preprocess, the mean and standard deviation of each channel, or nothing where the caller does not know."""

    preprocess: Preprocess | None = None
    mean: Statistic | None = None
    std: Statistic | None = None

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError("expected both mean and std of the transform, got only one; give the other too")
        if self.preprocess is not None and self.mean is not None:
            raise UsageError("expected a preprocess, or mean and std, got both; a preprocess has its own")

    @classmethod
    def of(cls, preprocess: Any, mean: Statistic | None, std: Statistic | None) -> LoaderPreprocessing:
        """Return what a caller states, whose preprocess :func:`.as_preprocess` takes; None is none."""
        return cls(None if preprocess is None else as_preprocess(preprocess), mean, std)

    def preprocess_of(self, shape: tuple[int, ...], low: Sequence[float], high: Sequence[float]) -> Preprocess:
        """Return the preprocess for inputs of ``shape`` (channels, height, width) with values from ``low`` to ``high``.

        Example:
            >>> print(LoaderPreprocessing(mean=0.5, std=0.25).preprocess_of((1, 8, 8), [-2.0], [2.0]))
            L, resized to 8 × 8 pixels, bilinear; mean 0.5; std 0.25

        Raises:
            UsageError: If the preprocess has another shape, there are not 1 or 3 channels, or a mean lacks a channel.
        """
        channels, height, width = shape
        if self.preprocess is not None:
            if self.preprocess.shape != shape:
                raise UsageError(
                    f"expected inputs of the preprocess's shape {self.preprocess.shape}, got {shape}; give the "
                    "preprocess of your transform"
                )
            return self.preprocess
        if self.mean is None or self.std is None:
            return ObservedPreprocess.of_range((channels, height, width), low, high)
        return Preprocess(mode_of(channels), height, width, None, _each(self.mean, channels), _each(self.std, channels))


@dataclass(frozen=True)
class ObservedPreprocess(Preprocess):
    """A stand-in for an unknown preprocessing, which takes the range of the inputs for 0 … 255.

    This is enough for pictures and made-up images, but cannot turn a file into an input.
    """

    is_known: ClassVar[bool] = False

    @classmethod
    def of_range(cls, shape: tuple[int, int, int], low: Sequence[float], high: Sequence[float]) -> ObservedPreprocess:
        """Return the stand-in for inputs of ``shape`` from ``low`` to ``high`` in each channel.

        Example:
            >>> ObservedPreprocess.of_range((1, 4, 4), [-1.0], [1.0]).standardise(torch.tensor([[[[0, 255]]]]).byte())
            tensor([[[[-1.,  1.]]]])
        """
        channels, height, width = shape
        std = tuple(1 / (top - bottom) if top > bottom else 1.0 for bottom, top in zip(low, high, strict=True))
        mean = tuple(-bottom * scale for bottom, scale in zip(low, std, strict=True))
        return cls(mode_of(channels), height, width, None, mean, std)

    def __str__(self) -> str:
        return f"{self.mode}, {self.height} × {self.width} inputs from a loader; preprocessing of files unknown"


def _each(statistic: Statistic, channels: int) -> tuple[float, ...]:
    """Return the statistic of each channel; a single number applies to all channels."""
    each: tuple[float, ...] = tuple(torch.as_tensor(statistic, dtype=torch.float64).reshape(-1).tolist())
    return each * channels if len(each) == 1 else each
