"""What is known of a regression's bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from psc_core.answers import RegressionPolicy
from psc_core.bundle import read_bundle
from psc_core.report.content import Content, Role, facts_of
from tests.psc_core.report.support import value_content, value_set


def test_facts_of_a_regression(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    found = facts_of(read_bundle(angle_bundle), value_content(manifest.version))
    text = found.to_text()
    assert text.splitlines()[1].split() == ["RMSE", "R²", "NLL,", "nats", "CRPS"]
    assert text.splitlines()[2].split() == ["the", "network", "itself", "2", "–", "–", "–"]
    assert text.splitlines()[3].split() == ["with", "PSC", "1", "0.5", "1.25", "0.75"]
    assert "on 4 validation images" in text and "at least 90.0% of images" in text and "uncertain: an interval" in text
    assert "less accurate" not in text and "synthetic OOD images found out of distribution: turned" in text
    assert found.flagged["clothes"] == sum(score > found.ood_threshold for score in (7.0, 8.0, 9.0)) / 3


def test_an_interval_is_too_wide_above_a_deviation(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    found = facts_of(read_bundle(angle_bundle), value_content(manifest.version))
    policies = (RegressionPolicy(alpha=0.05, coverage=0.9, max_width=width) for width in (40.0, None))
    limited, unlimited = (
        replace(found, manifest=manifest.model_copy(update={"policy": policy})) for policy in policies
    )
    assert unlimited.limits == {"deviations": None} and "no interval is too wide" in unlimited.to_text()
    residuals = sorted(read_bundle(angle_bundle).parts["calibration"]["residuals"].tolist())
    rank = next(k for k in range(1, len(residuals) + 1) if k >= (len(residuals) + 1) * 0.9 - 1e-9)
    assert limited.limits["deviations"] == pytest.approx(40 / (2 * residuals[rank - 1]))
    assert "uncertain: an interval wider than 40 degrees" in limited.to_text()


def test_warns_where_a_regression_loses_accuracy(angle_bundle: Path) -> None:
    version = read_bundle(angle_bundle).manifest.version
    for own_rmse, is_said in ((0.9, True), (0.97, False)):
        images = value_set("validation", Role.VALIDATION, [0.0] * 3, own_rmse=own_rmse)
        text = facts_of(read_bundle(angle_bundle), Content(version, (images,))).to_text()
        assert ("less accurate than the network's own" in text) == ("by 11% of its RMSE" in text) == is_said


def test_a_regression_without_images_has_the_recorded_quality(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    text = facts_of(read_bundle(angle_bundle), Content(manifest.version)).to_text()
    metrics = manifest.metrics
    shown = [f"{metrics[name]:.4g}" for name in ("rmse", "r2", "nll_nats", "crps")]
    assert text.splitlines()[2].split() == ["with", "PSC", *shown]
    assert f"on {metrics['validation_images']} validation images" in text
