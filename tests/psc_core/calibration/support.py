"""Calibrations and prediction sets for the tests of calibration."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from psc_core.calibration.conformal import Calibration, Thresholds
from psc_core.calibration.fit import fit_calibration
from psc_core.model.decision import decide
from psc_core.model.outputs import Outputs
from psc_core.policy import Policy
from psc_core.prediction import SCORES as COLUMNS

FEW_VALUES = st.sampled_from([-3.0, -1.5, 0.0, 0.125, 2.0])
FLOATS = st.one_of(FEW_VALUES, st.floats(-1e6, 1e6, width=32))
SCORES = st.lists(FLOATS, min_size=1, max_size=60)


def calibrate(n: int = 200, classes: int = 4) -> Calibration:
    random = torch.Generator().manual_seed(0)
    probabilities = torch.randn(n, classes, generator=random).mul(2).softmax(1)
    drawn = torch.multinomial(probabilities, 1, generator=random)[:, 0]
    entropy = torch.special.entr(probabilities).sum(1)
    return fit_calibration(torch.randn(n, generator=random), entropy, probabilities, drawn)


def prediction_sets(threshold: float, probabilities: Tensor) -> Tensor:
    packed = torch.cat([torch.zeros(len(probabilities), len(COLUMNS)), probabilities], 1)
    policy = Policy(alpha=0.5, ambiguity_threshold=1.0, coverage=0.9)
    return torch.from_numpy(decide(Outputs(packed.numpy(), ()), Thresholds(policy, 0.5, threshold)).prediction_set)


def from_scores(scores: list[float]) -> Calibration:
    """From negated OOD scores, such as log densities."""
    n = len(scores)
    return fit_calibration(
        -torch.tensor(scores), torch.rand(n), torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64)
    )
