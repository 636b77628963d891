"""Calibration on the calibration split alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import FitOptions, fit_projection, fit_psc, measure_collapse
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.fitting.calibrate import entropy_weight, upper_spread
from psc_core.fitting.parts import FittedProjection
from tests.reference import calibration as reference

OPTIONS = FitOptions(device="cpu")


def test_entropy_counts_as_much_as_density(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate("4")
    plain, both = (
        fit_psc(net, candidate, projection, train, val, head="duq", ood_score=score, options=OPTIONS)
        for score in ("density", "density+entropy")
    )
    choose, calibrate = split_validation(val, OPTIONS.seed)
    alone = plain.predict(next(choose.batches(len(choose))).images)
    weight = both.pipeline.entropy_weight
    assert plain.pipeline.entropy_weight == 0.0
    density, entropy = (values.tolist() for values in (-alone.log_density, alone.predictive_entropy))
    assert weight == pytest.approx(reference.upper_spread(density) / reference.upper_spread(entropy))
    images = next(calibrate.batches(len(calibrate))).images
    alone, told = plain.predict(images), both.predict(images)
    assert torch.equal(alone.ood_score, -alone.log_density)
    torch.testing.assert_close(told.log_density, alone.log_density)
    torch.testing.assert_close(told.ood_score, weight * told.predictive_entropy - told.log_density)
    torch.testing.assert_close(both.calibration.ood_scores, told.ood_score.sort().values)
    n = len(images)  # of n calibration images themselves, the k-th strangest has the p-value (k + 1) / (n + 1)
    assert sorted((told.ood_p_value * (n + 1)).round().int().tolist()) == list(range(2, n + 2))


def test_calibration_split_selects_nothing(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    calibrates = torch.isin(val.indices, split_validation(val, OPTIONS.seed)[1].indices)
    other = replace(val, labels=torch.where(calibrates, (val.labels + 1) % 10, val.labels))
    collapse, other_collapse = (
        measure_collapse(net, train, data, layers="^4$", options=OPTIONS) for data in (val, other)
    )
    assert collapse == other_collapse
    candidate = collapse.candidate("4")
    assert fit_projection(net, candidate, train, other, options=OPTIONS).report.choice == projection.report.choice
    one, two = (
        fit_psc(net, candidate, projection, train, data, head="duq", options=OPTIONS).pipeline for data in (val, other)
    )
    assert one.scorer.head is not None and two.scorer.head is not None
    assert one.scorer.head.record == two.scorer.head.record
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def test_risk_reaches_the_ambiguity_threshold(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in (0.3, None):
        monkeypatch.setattr(
            "psc_core.fitting.calibrate.ambiguity_threshold", lambda *_, risk, found=found: found and risk
        )
        psc = fit_psc(net, Candidate(("4",), ""), projection, train, val, head="duq", risk=0.3, options=OPTIONS)
        assert psc.policy.ambiguity_threshold == pytest.approx(found or 2 * math.log(10))
        assert psc.report["metrics"]["risk"] == {"promised": 0.3, "confidence": 0.95, "threshold": found}


def test_constant_entropy_has_no_weight() -> None:
    log_density = torch.arange(5.0)
    assert entropy_weight({"log_density": log_density, "predictive_entropy": torch.full((5,), 0.3)}) == 0.0
    weight = entropy_weight({"log_density": log_density, "predictive_entropy": log_density / 4})
    assert weight == pytest.approx(4.0)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50))
def test_upper_spread_equals_twin(score: list[float]) -> None:
    found = upper_spread(torch.tensor(score, dtype=torch.float64))
    assert found == pytest.approx(reference.upper_spread(score), rel=1e-9, abs=1e-9)


def test_heavy_tail_does_not_move_the_weight() -> None:
    log_density = torch.randn(400, generator=torch.Generator().manual_seed(0))
    scores = {"log_density": log_density, "predictive_entropy": torch.linspace(0, 1, 400)}
    tail = torch.where(log_density < log_density.quantile(0.02), 1e6 * log_density, log_density)
    assert entropy_weight({**scores, "log_density": tail}) == pytest.approx(entropy_weight(scores))
