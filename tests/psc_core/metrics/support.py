"""Strategies for the tests of metrics."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

LEVELS = st.sampled_from([0.0, 0.1, 1 / 3, 0.5, 2 / 3, 0.9, 1.0])
"""Few distinct values, so ties, all-equal inputs and the ends of [0, 1] are common."""

SCORES = st.one_of(
    st.lists(LEVELS, min_size=1, max_size=25),
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=25),
    st.lists(st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf]), min_size=1, max_size=8),
)
PREDICTIONS = st.lists(st.tuples(st.one_of(LEVELS, st.floats(0, 1)), st.booleans()), min_size=1, max_size=40)


def tensor(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def unzip(predictions: list[tuple[float, bool]]) -> tuple[torch.Tensor, torch.Tensor]:
    return tensor([c for c, _ in predictions]), torch.tensor([ok for _, ok in predictions])
