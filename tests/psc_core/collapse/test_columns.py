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
    rounds = [
        [(layer, range(math.prod(layer.shape))[part]) for layer in group] for group, parts in groups for part in parts
    ]
    assert len(groups) == 2 and [[(layer.name, part) for layer, part in each] for each in rounds] == [
        [("conv", range(49))],
        [("conv", range(49, 64))],
        [("pool", range(16)), ("hidden", range(5)), ("out:input", range(5)), ("out", range(3))],
    ]
    for each in rounds:
        assert sum(4 * 8 * math.prod(layer.shape) + 8 * 10 * len(part) for layer, part in each) <= 6000
