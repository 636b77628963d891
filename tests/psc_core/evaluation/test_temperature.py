"""The temperature against a numerical minimiser, and at the ends of its range."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize

from psc_core.evaluation.baselines import fit_temperature
from psc_core.heads.softmax import TEMPERATURES
from tests.reference import metrics as naive

LOGITS = st.lists(st.lists(st.floats(-60, 60), min_size=3, max_size=3), min_size=1, max_size=12)


@given(LOGITS, st.integers(0, 2))
def test_temperature_minimises_the_nll(drawn: list[list[float]], label: int) -> None:
    labels = [(label + i) % 3 for i in range(len(drawn))]

    def loss(log_temperature: float) -> float:
        return naive.tempered_nll(drawn, labels, math.exp(log_temperature))

    logits = torch.tensor(drawn, dtype=torch.float64)
    found = fit_temperature(logits, torch.tensor(labels))
    assert TEMPERATURES[0] * 0.999 <= found <= TEMPERATURES[1] * 1.001
    best = optimize.minimize_scalar(loss, bounds=tuple(map(math.log, TEMPERATURES)), method="bounded")
    assert loss(math.log(found)) <= best.fun + 1e-6


def test_extreme_and_uninformative_logits() -> None:
    labels = torch.tensor([0, 1])
    never_wrong = fit_temperature(torch.tensor([[5.0, 0.0], [0.0, 5.0]]), labels)
    assert TEMPERATURES[0] <= never_wrong < 0.2  # the loss is zero from there on
    assert fit_temperature(torch.tensor([[0.0, 5.0], [5.0, 0.0]]), labels) == pytest.approx(TEMPERATURES[1])
    assert fit_temperature(torch.zeros(2, 2), labels) == 1.0


def test_recovers_a_known_temperature() -> None:
    generator = torch.Generator().manual_seed(0)
    honest = torch.randn(20_000, 5, generator=generator, dtype=torch.float64) * 2
    labels = torch.multinomial(honest.softmax(1), 1, generator=generator).squeeze(1)
    assert fit_temperature(honest * 3, labels) == pytest.approx(3, rel=0.05)
