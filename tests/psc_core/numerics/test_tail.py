"""The tail of held-out readings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.numerics.linalg import tail_excess
from tests.reference import gates as naive

READINGS = st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=50).map(sorted)


@given(READINGS, st.data())
def test_excess_matches_the_twin(readings: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(readings)))
    got = tail_excess(torch.tensor([readings, [2 * each for each in readings]], dtype=torch.float64).T, k)
    exact = naive.tail_excess(readings, k)
    assert got.tolist() == pytest.approx([exact, 2 * exact], abs=1e-9)
