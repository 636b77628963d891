"""What the stages refuse before they read an image, and what they fill in."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitSettings
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.fit import check_same_layers, checked, trial_of
from psc_core.fit_data import FitData
from psc_core.model import TRIAL_IMAGES
from psc_core.projection import FittedProjection

SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def data(train: ImageDataset, val: ImageDataset) -> FitData:
    return FitData.of(train, val)


def test_settings_get_the_head_of_the_task(data: FitData) -> None:
    assert checked(SETTINGS, data).head == next(iter(data.task_type.heads))
    assert checked(SETTINGS.changed({"head": "duq"}), data).head == "duq"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"head": "blr"}, "head"),
        ({"density": "kde"}, "density"),
        ({"ood_score": "energy"}, "ood_score"),
        ({"predictions": "both"}, "predictions"),
        ({"head_input": "x"}, "head_input"),
        ({"alpha": 1e-9}, "alpha"),
        ({"coverage": 1.5}, "coverage"),
        ({"stored_images": -1}, "examples"),
        ({"predictions": "original", "head": "duq"}, "expected no head beside predictions 'original'"),
        ({"predictions": "original", "head_input": "z"}, "expected no head_input beside predictions 'original'"),
    ],
)
def test_unknown_options_and_rates_that_cannot_be_kept_are_refused(
    data: FitData, wrong: dict[str, object], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        checked(SETTINGS.changed(dict(**wrong)), data)  # type: ignore[arg-type]


def test_a_model_is_tried_with_the_first_calibration_images(data: FitData) -> None:
    images = trial_of(data.calibration)
    assert len(images) == min(TRIAL_IMAGES, len(data.calibration))
    assert torch.equal(images[:8], next(data.calibration.batches(8)).images)


def test_rejects_a_projection_of_other_layers(projection: FittedProjection) -> None:
    with pytest.raises(UsageError, match="expected a projection of the chosen layer 2, got one of 4"):
        check_same_layers(ChosenLayer(("2",), ""), projection)
