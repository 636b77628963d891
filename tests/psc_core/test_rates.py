"""Ranks of rates against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psc_core.conformal import check_fraction, conformal_rank, ood_rank, tolerant_ceil
from psc_core.errors import UsageError


@given(hundredths=st.integers(1, 99), n=st.integers(1, 10_000))
def test_ranks_are_those_of_the_decimal_number(hundredths: int, n: int) -> None:
    exact = Fraction(hundredths, 100) * (n + 1)
    assert ood_rank(hundredths / 100, n) == floor(exact)
    assert tolerant_ceil(hundredths / 100 * (n + 1)) == ceil(exact)
    assert conformal_rank(hundredths / 100, n) == ceil(exact)


@pytest.mark.parametrize("coverage", [5e-324, 1e-14, 1e-9])
def test_a_tiny_coverage_has_the_first_rank(coverage: float) -> None:
    assert [conformal_rank(coverage, n) for n in (1, 1000)] == [1, 1]


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_rejects_what_is_no_fraction(value: float) -> None:
    with pytest.raises(UsageError, match="expected risk between 0 and 1"):
        check_fraction(value, "risk")
