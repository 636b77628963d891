"""Images, settings and device of a fit: every stage takes them together, as one :class:`FitJob`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from psc_core.compute.passes import Compute
from psc_core.compute.readable import only_readable
from psc_core.data.dataset import drawn
from psc_core.fitting.data import FitData
from psc_core.settings import FitSettings
from psc_core.tasks.fit.task import FIRST_LOOK_IMAGES, FirstLook


@dataclass(frozen=True)
class FitJob:
    """The images, the settings and the device of a fit."""

    data: FitData
    settings: FitSettings  # as :func:`.stages.checked` returns them
    compute: Compute  # device, precision, batch size, processes

    @classmethod
    def of(cls, data: FitData, settings: FitSettings) -> FitJob:
        """Return a job of this process alone, on the device that the settings name."""
        return cls(data, settings, settings.compute())

    def first_look(self, net: nn.Module, max_bad_images: int = 0) -> FirstLook:
        """Return how good the plain network, on the device, is on a few random images."""
        train, val = (
            only_readable(drawn(images, FIRST_LOOK_IMAGES, self.data.seed), max_bad_images)
            for images in (self.data.train, self.data.val)
        )
        return self.data.task_fit.first_look(net, train, val, self.compute)
