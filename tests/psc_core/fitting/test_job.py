"""Images, settings and device of a fit."""

from __future__ import annotations

from psc_core import FitSettings
from psc_core.data.dataset import ImageDataset
from psc_core.fit_data import FitData, FitJob


def test_a_job_computes_as_its_settings_say(train: ImageDataset, val: ImageDataset) -> None:
    settings = FitSettings(device="cpu", batch_images=7, max_memory=1 << 20)
    data = FitData.of(train, val)
    job = FitJob.of(data, settings)
    assert job.data is data and job.settings is settings
    assert (job.compute.device.type, job.compute.batch_images, job.compute.max_memory) == ("cpu", 7, 1 << 20)
