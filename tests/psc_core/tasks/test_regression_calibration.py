"""Conformal intervals: their definition, their coverage, and what a bundle may not hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.answers import RegressionPolicy
from psc_core.errors import BundleError, FitError, UsageError
from psc_core.metrics import binomial_acceptance
from psc_core.tasks.regression import Calibration, fit_calibration


def calibration(n: int, seed: int = 0) -> Calibration:
    generator = torch.Generator().manual_seed(seed)
    mean, deviation = torch.randn(n, generator=generator), 1 + torch.rand(n, generator=generator)
    values = mean + 2 * deviation * torch.randn(n, generator=generator)
    return fit_calibration(torch.randn(n, generator=generator), mean, deviation, values)


@given(st.integers(1, 60), st.floats(0.01, 0.99))
def test_deviations_equal_their_definition(n: int, coverage: float) -> None:
    fitted = calibration(n)
    rank = math.ceil((n + 1) * coverage - 1e-9)
    if rank > n:
        with pytest.raises(UsageError, match="expected coverage"):
            fitted.quantile(coverage)
    else:
        assert fitted.quantile(coverage) == sorted(fitted.residuals.tolist())[rank - 1]


def test_a_tiny_coverage_has_the_narrowest_interval() -> None:
    fitted = calibration(30)
    assert fitted.quantile(1e-14) == float(fitted.residuals[0])


def test_residuals_are_in_standard_deviations() -> None:
    fitted = fit_calibration(
        torch.tensor([2.0, 1.0]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 0.5]), torch.tensor([3.0, -1.0])
    )
    assert (fitted.ood_scores.tolist(), fitted.residuals.tolist()) == ([1.0, 2.0], [1.5, 2.0])


def test_intervals_hold_new_numbers_at_the_nominal_rate() -> None:
    """Over many calibrations of few images, so that neither luck of one nor rounding hides a wrong rank."""
    draws, n, coverage = 4000, 19, 0.8
    generator = np.random.default_rng(0)
    noise = generator.standard_exponential((draws, n + 1)).astype(np.float32)
    held = 0
    for row in noise:
        scores = torch.from_numpy(np.sort(row[:n]))
        held += bool(row[n] <= Calibration(scores, scores).quantile(coverage))
    low, high = binomial_acceptance(draws, coverage, level=0.999)
    assert low <= held <= high


def test_thresholds_of_a_policy() -> None:
    fitted = calibration(99)
    thresholds = fitted.thresholds(RegressionPolicy(alpha=0.05, max_width=3.0, coverage=0.9))
    assert thresholds.ood_p_value == pytest.approx(5.5 / 100)
    assert thresholds.quantile == fitted.quantile(0.9)
    with pytest.raises(UsageError, match="expected alpha"):
        fitted.thresholds(RegressionPolicy(alpha=0.001, max_width=None, coverage=0.9))


def test_survives_a_bundle() -> None:
    fitted = calibration(20)
    again = Calibration.from_tensors(fitted.tensors())
    assert torch.equal(again.residuals, fitted.residuals) and torch.equal(again.ood_scores, fitted.ood_scores)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"residuals": None}, "expected calibration tensors"),
        ({"residuals": torch.tensor([2.0, 1.0])}, "expected ascending"),
        ({"residuals": torch.tensor([1.0])}, "of one length"),
        ({"residuals": torch.tensor([-1.0, 1.0])}, "expected calibration residuals from 0"),
        ({"ood_scores": torch.tensor([0.0, 3e38])}, "expected calibration ood_scores"),
        ({"ood_scores": torch.tensor([0.0, float("nan")])}, "expected ascending finite"),
        ({"ood_scores": torch.tensor([0.0, 1.0]).double()}, "float32"),
    ],
)
def test_rejects_other_tensors(changes: dict[str, torch.Tensor | None], said: str) -> None:
    whole = {"ood_scores": torch.tensor([0.0, 1.0]), "residuals": torch.tensor([0.0, 1.0])}
    with pytest.raises(BundleError, match=said):
        Calibration.from_tensors({k: v for k, v in (whole | changes).items() if v is not None})


def test_scores_that_are_not_finite_are_refused() -> None:
    zero, one = torch.zeros(2), torch.ones(2)
    with pytest.raises(FitError, match="finite residuals"):
        fit_calibration(one, one, zero, one)
    with pytest.raises(FitError, match="finite OOD scores"):
        fit_calibration(one / 0, one, one, one)
