"""Each setting is read by the stages that it is declared for: a checkpoint of the others holds whatever its value."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from psc_core import FitSettings, open_dataset
from psc_core import fit as stages
from psc_core.fit_data import FitData, FitJob
from psc_core.images.preprocess import PRESETS
from psc_core.settings import Stage, settings_where
from tests.conftest import TinyJob


def recording(settings: FitSettings, read: set[str]) -> FitSettings:
    """Return the same settings, whose names are added to ``read`` as they are read."""

    class Recording(FitSettings):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    same = Recording(**dict(settings))
    read.clear()  # The constructor checks them all.
    return same


@pytest.mark.parametrize(("job", "images"), [("tiny_job", "mnist"), ("angle_job", "rotated-mnist")])
def test_a_setting_of_one_stage_is_read_by_that_stage_alone(
    job: str, images: str, data_root: Path, request: pytest.FixtureRequest
) -> None:
    trained: TinyJob = request.getfixturevalue(job)
    opened = partial(open_dataset, f"{images}:{data_root}", preprocess=PRESETS["mnist"])
    data = FitData.of(opened(split="train"), opened(split="val"))
    settings = stages.checked(FitSettings(device="cpu", minimum_dim=8), data)
    read: dict[Stage, set[str]] = {stage: set() for stage in Stage}
    jobs = {stage: FitJob(data, recording(settings, read[stage]), settings.compute()) for stage in Stage}
    chosen = stages.collapse(trained.net, jobs[Stage.COLLAPSE]).choose()
    projection = stages.project(trained.net, chosen, jobs[Stage.PROJECTION])
    stages.fit_model(trained.net, chosen, projection, jobs[Stage.LAST])
    for stage in Stage:
        by_others = set().union(*(read[other] for other in Stage if other != stage))
        declared = {*filter(data.task_type.reads, settings_where(stage=stage))}
        assert read[stage] & {*settings_where()} - by_others == declared, stage
