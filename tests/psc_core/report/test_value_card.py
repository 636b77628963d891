"""What is said of a fitted regression."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.bundle.io import read_bundle
from psc_core.errors import BundleError
from psc_core.report import value_card
from psc_core.report.content import Content
from psc_core.report.facts import facts_of


def test_card_and_last_lines_say_the_same(angle_bundle: Path) -> None:
    manifest = read_bundle(angle_bundle).manifest
    card, text = (angle_bundle / "README.md").read_text(), value_card.to_text(manifest)
    assert f"RMSE {manifest.metrics['rmse']:.4g} degrees" in text and "at least 90.0%" in text
    assert all(line in card for line in text.splitlines()) and "psc-serve --bundle ." in card


def test_a_classifier_has_another_card(shipped_bundle: Path) -> None:
    with pytest.raises(TypeError, match="is a classifier"):
        value_card.to_text(read_bundle(shipped_bundle).manifest)


def test_a_regression_has_no_report(angle_bundle: Path) -> None:
    version = read_bundle(angle_bundle).manifest.version
    with pytest.raises(BundleError, match="of a regression, which has no report"):
        facts_of(angle_bundle, Content(version))
