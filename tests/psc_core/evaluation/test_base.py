"""Observed rates beside nominal ones."""

from __future__ import annotations

import pytest
import torch

from psc_core.evaluation.evaluate import observed_rate
from tests.psc_core.evaluation.support import rate


@pytest.mark.parametrize(
    ("count", "assessment"),
    [(19, "lower than stated"), (20, "as stated"), (80, "as stated"), (81, "higher than stated")],
)
def test_assessment_at_the_edges(count: int, assessment: str) -> None:
    assert rate(count).assessment == assessment


def test_observed_rates_follow_the_beta_binomial() -> None:
    happened = torch.zeros(1000, dtype=torch.bool)
    assert observed_rate(happened, 0.05, 199).assessment == "lower than stated"
    happened[:75] = True
    noisy, sharp = observed_rate(happened, 0.05, 199), observed_rate(happened, 0.05, 99_999)
    assert noisy.assessment == "as stated" and noisy.acceptance.high < 75
    assert sharp.assessment == "higher than stated"
