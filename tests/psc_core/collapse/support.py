"""Collapse measured with the settings' own device."""

from __future__ import annotations

from torch import nn

from psc_core.collapse import CollapseReport, measure_layers
from psc_core.data.dataset import ImageDataset
from psc_core.settings import FitSettings
from psc_core.tasks.fit.task import task_fit_for


def measured(
    net: nn.Module, train: ImageDataset, val: ImageDataset, settings: FitSettings, processes: tuple[int, int] = (0, 1)
) -> CollapseReport:
    """Return what ``psc-fit`` finds on these images, none of them set apart."""
    quality = task_fit_for(train).layer_quality
    return measure_layers(net, train, val, settings, settings.compute(processes), quality)
