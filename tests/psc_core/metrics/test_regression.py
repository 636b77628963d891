"""Metrics of a regression beside their definitions and scikit-learn's."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import r2_score, root_mean_squared_error

from psc_core.metrics import crps, gaussian_nll, r2, rises_with, rmse

NUMBERS = st.lists(
    st.tuples(st.floats(-50, 50), st.floats(0.1, 20), st.floats(-50, 50)), min_size=2, max_size=20
).filter(lambda rows: len({y for _, _, y in rows}) > 1)


@given(NUMBERS)
def test_equal_their_references(rows: list[tuple[float, float, float]]) -> None:
    mean, deviation, y = torch.tensor(rows, dtype=torch.float64).T
    assert rmse(mean, y) == pytest.approx(root_mean_squared_error(y, mean))
    assert r2(mean, y) == pytest.approx(r2_score(y, mean), rel=1e-9)
    assert gaussian_nll(mean, deviation, y) == pytest.approx(-stats.norm(mean, deviation).logpdf(y).mean())


@given(st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=3, max_size=7))
def test_better_than_guessing_is_above_the_correlations_of_all_orders(rows: list[tuple[int, int]]) -> None:
    mean, y = np.array(rows, float).T
    products = [float(np.array(order) @ y) for order in permutations(mean)]
    chance = np.mean(products) + 1.645 * np.std(products)
    expected = bool((y == y[0]).all()) or (float(mean @ y) > chance + 1e-9 and np.ptp(mean) > 0)
    assert rises_with(torch.tensor(mean), torch.tensor(y)) == expected


def test_crps_is_the_integral_of_its_definition() -> None:
    for mean, deviation, y in ((0.0, 1.0, 0.3), (2.0, 0.5, 5.0), (-1.0, 3.0, -1.0)):

        def gap(at: float, mean: float = mean, deviation: float = deviation, y: float = y) -> float:
            return float((stats.norm.cdf(at, mean, deviation) - (at >= y)) ** 2)

        ends = mean - 12 * deviation, mean + 12 * deviation
        expected = integrate.quad(gap, ends[0], y)[0] + integrate.quad(gap, y, ends[1])[0]
        got = crps(torch.tensor([mean]), torch.tensor([deviation]), torch.tensor([y]))
        assert got == pytest.approx(expected, rel=1e-5)


def test_numbers_that_do_not_vary() -> None:
    flat = torch.ones(3)
    assert (r2(flat, flat), r2(flat + 1, flat)) == (1.0, 0.0)
    assert np.isfinite(crps(flat, flat, flat))
