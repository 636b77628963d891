"""Fitting a calibration, and the ambiguity threshold against a search."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.calibration.fit import ambiguity_threshold, fit_calibration
from psc_core.errors import FitError
from tests.reference import calibration as naive


def test_rejects_scores_that_are_not_finite() -> None:
    n, zeros = 5, torch.zeros(5)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(zeros - math.inf, zeros, torch.full((n, 2), 0.5), torch.zeros(n, dtype=torch.int64))


@given(
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 0.7, 1.0, 2.0]), st.booleans()), min_size=1, max_size=60),
    st.sampled_from([0.01, 0.05, 0.3, 0.9]),
    st.sampled_from([0.5, 0.95]),
)
def test_ambiguity_threshold_matches_search(images: list[tuple[float, bool]], risk: float, quantile: float) -> None:
    entropy = torch.tensor([value for value, _ in images])
    correct = torch.tensor([right for _, right in images])
    expected = naive.ambiguity_threshold(entropy, correct, risk, quantile)
    assert ambiguity_threshold(entropy, correct, risk=risk, quantile=quantile) == pytest.approx(expected)
