from __future__ import annotations

import math

import pytest
import torch

from psc_core import collapse as columns
from psc_core.network.layers import list_layers
from tests.psc_core.collapse.test_measure import Net


def test_groups_fit_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "MIN_COLUMNS", 1)
    layers = list_layers(Net(), torch.zeros(1, 1, 6, 6))
    groups = columns.layer_groups(layers, classes=10, batch_images=8, budget=6000)
    rounds = [ranges for group in groups for ranges in group.rounds]
    found = [[(part.layer.name, part.start, part.stop) for part in ranges] for ranges in rounds]
    assert len(groups) == 2 and found == [
        [("conv", 0, 49)],
        [("conv", 49, 64)],
        [("pool", 0, 16), ("hidden", 0, 5), ("out:input", 0, 5), ("out", 0, 3)],
    ]
    for ranges in rounds:
        assert sum(4 * 8 * math.prod(part.layer.shape) + 8 * 10 * (part.stop - part.start) for part in ranges) <= 6000
