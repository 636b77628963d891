"""The parts that the last stage of either task fits before it calibrates."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitSettings
from psc_core.collapse import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.fit_data import FitData, FitJob
from psc_core.fit_parts import fit_parts, report_of
from psc_core.projection import FittedProjection

SETTINGS = FitSettings(device="cpu")
CANDIDATE = Candidate(("4",), "")


@pytest.mark.parametrize("with_gates", [False, True])
def test_gates_add_the_layer_of_the_texture(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection, with_gates: bool
) -> None:
    settings = SETTINGS.changed({"head": "duq", "density": "gda", "ood_score": "gates" if with_gates else "density"})
    parts = fit_parts(net, CANDIDATE, projection, FitJob.of(FitData.of(train, val), settings))
    assert (parts.chosen_gates is not None) == with_gates == ("texture" in parts.gate_names)
    assert (parts.scorer.texture is not None) == with_gates
    assert len(parts.backbone.layers) == 1 + with_gates and parts.backbone.layers[0] == "4"
    report = report_of(CANDIDATE, projection, parts, {"accuracy": 1 / 3}, None)
    assert report["metrics"]["accuracy"] == 0.333333333
    assert ("gates" in report["metrics"]) == with_gates
