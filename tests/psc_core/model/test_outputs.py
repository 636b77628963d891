"""Packing outputs."""

from __future__ import annotations

import torch

from psc_core.model.outputs import Outputs, pack
from psc_core.prediction import SCORES


def test_pack_and_read_back() -> None:
    scores, probabilities = {name: torch.rand(3) for name in SCORES}, torch.rand(3, 4)
    outputs = Outputs(pack(scores, probabilities), ())
    assert torch.equal(outputs.probabilities, probabilities)
    for name, values in scores.items():
        assert torch.equal(outputs[name], values)
