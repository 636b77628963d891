"""The interface of a layer's quality besides NC1: how well it knows what the network predicts, by NC4 or R²."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from torch import Tensor

from psc_core.collapse.columns import ColumnRange, LayerGroup
from psc_core.collapse.report import Measure
from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.network.backbone import Backbone

Round = tuple[Sequence[ColumnRange], Sequence[Tensor]]
"""Ranges of columns, and the class means (classes, columns) of each over the training images."""


class LayerQuality:
    """The quality of every layer on the validation images; higher is better.

    Args:
        train: All training images.
        val: All validation images.
        compute: Device, batch size, memory and processes.
    """

    measure: ClassVar[Measure]

    def __init__(self, train: ImageDataset, val: ImageDataset, compute: Compute) -> None:
        self.train = train
        self.val = val
        self.compute = compute

    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Measure the layers of a group.

        Args:
            backbone: The network, cut behind these layers.
            group: The layers.
            rounds: The group's rounds with their class means, which may be overwritten.  Taking a round makes a pass
                over the training images that measures NC1, so every round has to be taken.
            label: The beginning of the progress bars' text.
        """
        raise NotImplementedError

    def value(self, layer: str) -> float:
        """Return the quality after ``layer``."""
        raise NotImplementedError

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between the qualities after ``layer`` and after ``best``."""
        raise NotImplementedError
