"""R² beside scikit-learn's, of numbers that do not vary too."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import r2_score

from psc_core.numerics.linalg import r_squared, r_squared_error

NUMBERS = st.one_of(st.floats(-50, 50), st.sampled_from([0.0, 0.1, 1e9]))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=20))
def test_equals_its_reference(pairs: list[tuple[float, float]]) -> None:
    y, predicted = torch.tensor(pairs, dtype=torch.float64).T
    found = r_squared((y - predicted).square(), y)
    if float((y - y.mean()).abs().max()) > 1e-6 or bool((y == y[0]).all()):
        assert found == pytest.approx(r2_score(y, predicted), rel=1e-9, abs=1e-9)


def test_error_of_a_difference() -> None:
    y = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    good, bad = torch.tensor([0.1, 0.0, 0.1, 0.0]).double(), torch.tensor([1.0, 1.0, 1.0, 1.0]).double()
    assert r_squared(good, y) == pytest.approx(1 - 0.2 / 5) and r_squared(bad, y) == pytest.approx(0.2)
    assert r_squared_error(good, bad, y) == pytest.approx((0.81 + 1 + 0.81 + 1) ** 0.5 / 5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])  # The mean of seven times 0.1 is another number.
def test_equal_numbers_leave_nothing_to_explain(value: float) -> None:
    flat = torch.full((7,), value).double()
    assert (r_squared(0 * flat, flat), r_squared(0 * flat + 1, flat)) == (1.0, 0.0)
    assert r_squared_error(0 * flat, 0 * flat + 1, flat) == 0.0
