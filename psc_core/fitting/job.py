"""Images, settings and device of a fit: every stage takes them together, as one :class:`FitJob`."""

from __future__ import annotations

from dataclasses import dataclass

from psc_core.compute.passes import Compute
from psc_core.fitting.data import FitData
from psc_core.settings import FitSettings


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
