"""P-values of gates from held-out readings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import FitError
from psc_core.gates import MINIMUM_TAIL, fit_gates, tail_scales, vary
from psc_core.numerics.linalg import TAIL_FRACTION
from tests.reference import gates as naive


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=300))
def test_scale_matches_the_twin(readings: list[float]) -> None:
    (got,) = tail_scales(torch.tensor(readings).sort().values[:, None]).tolist()
    assert got == pytest.approx(naive.tail_scale(readings, TAIL_FRACTION, MINIMUM_TAIL), rel=1e-5, abs=1e-30)


def test_readings_are_sorted_by_gate() -> None:
    selection, calibration = torch.tensor([[3.0, 1.0], [1.0, 2.0]]), torch.tensor([[5.0, 0.0], [4.0, 9.0], [6.0, 1.0]])
    gates = fit_gates(["kind", "confidence"], selection, calibration)
    assert gates.ascending.tolist() == [[1, 3], [1, 2]]
    assert gates.calibration.tolist() == [[4, 5, 6], [0, 1, 9]]


def test_readings_that_cannot_rank_are_rejected() -> None:
    varied = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(FitError, match="those of confidence are all equal"):
        fit_gates(["kind", "confidence"], varied * torch.tensor([1.0, 0.0]), varied)
    with pytest.raises(FitError, match="finite"):
        fit_gates(["kind", "confidence"], varied, varied.log() - torch.inf)


@pytest.mark.parametrize(("steps", "varies"), [(0, False), (4, False), (4000, True)])
def test_readings_that_differ_by_rounding_are_equal(steps: int, varies: bool) -> None:
    readings = 30 + steps * torch.finfo(torch.float32).eps * 30 * torch.linspace(0, 1, 50)
    assert vary(readings) is varies
