"""The parts that the last stage of either task fits before it calibrates."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitSettings
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset
from psc_core.fit_data import FitData, FitJob
from psc_core.fit_parts import fit_parts, report_of
from psc_core.projection import FittedProjection

SETTINGS = FitSettings(device="cpu")
CANDIDATE = ChosenLayer(("4",), "")


@pytest.mark.parametrize("with_checks", [False, True])
def test_checks_add_the_layer_of_the_texture(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, with_checks: bool
) -> None:
    settings = SETTINGS.changed({"head": "duq", "density": "gda", "ood_score": "checks" if with_checks else "density"})
    parts = fit_parts(net, CANDIDATE, projection, FitJob.of(FitData.of(train, val), settings))
    assert (parts.chosen_checks is not None) == with_checks == ("texture" in parts.check_names)
    assert (parts.scorer.texture is not None) == with_checks
    assert len(parts.backbone.layers) == 1 + with_checks and parts.backbone.layers[0] == "4"
    report = report_of(CANDIDATE, projection, parts, {"accuracy": 1 / 3}, None)
    assert report["metrics"]["accuracy"] == 0.333333333
    assert ("checks" in report["metrics"]) == with_checks
