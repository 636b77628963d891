"""Risk and coverage against loops and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import metrics as selective
from tests.psc_core.metrics.support import PREDICTIONS, tensor, unzip
from tests.reference import metrics as naive


@given(PREDICTIONS, st.sampled_from([0.0, 0.01, 0.05, 0.5, 1.0]))
def test_selective_metrics_match_loops(predictions: list[tuple[float, bool]], risk: float) -> None:
    c, ok = unzip(predictions)
    plain = c.tolist(), ok.tolist()
    assert selective.aurc(c, ok) == pytest.approx(naive.aurc(*plain), abs=1e-12)
    assert selective.augrc(c, ok) == pytest.approx(naive.augrc(*plain), abs=1e-12)
    assert selective.coverage_at_risk(c, ok, risk) == pytest.approx(naive.coverage_at_risk(*plain, risk))


def test_selective_metrics_by_hand() -> None:
    c, ok = tensor([0.9, 0.8, 0.7, 0.6]), torch.tensor([True, True, False, True])
    assert selective.aurc(c, ok) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)
    assert selective.augrc(c, ok) == pytest.approx((0 + 0 + 0.5 + 1) / 16)
    assert selective.coverage_at_risk(c, ok, 0.01) == 0.5
    assert selective.coverage_at_risk(c, ok, 0.25) == 1.0
    assert selective.coverage_at_risk(c, torch.tensor([False] * 4), 0.01) == 0.0
    assert selective.coverage_at_risk(c, torch.tensor([True] * 4), 0.0) == 1.0
