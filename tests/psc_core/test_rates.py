"""Ranks of rates against exact fractions."""

from __future__ import annotations

from fractions import Fraction
from math import ceil, floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import UsageError
from psc_core.rates import check_fraction, ood_rank, tolerant_ceil


@given(hundredths=st.integers(1, 99), n=st.integers(1, 10_000))
def test_ranks_are_those_of_the_decimal_number(hundredths: int, n: int) -> None:
    exact = Fraction(hundredths, 100) * (n + 1)
    assert ood_rank(hundredths / 100, n) == floor(exact)
    assert tolerant_ceil(hundredths / 100 * (n + 1)) == ceil(exact)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2.0, float("nan")])
def test_rejects_what_is_no_fraction(value: float) -> None:
    with pytest.raises(UsageError, match="expected risk between 0 and 1"):
        check_fraction(value, "risk")
