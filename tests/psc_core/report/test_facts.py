"""Facts of a bundle, beside a naive count."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.bundle import read_bundle
from psc_core.errors import BundleError
from psc_core.model import PSC
from psc_core.report.content import Content, Role, facts_of
from tests.psc_core.report.support import content, image_set


def test_facts_of_the_shipped_bundle(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    found = facts_of(read_bundle(shipped_bundle), content(version))
    threshold = PSC.load(shipped_bundle, device="cpu").calibration.ood_score_threshold(0.05)
    assert found.ood_threshold == threshold
    assert found.flagged == {
        images.name: sum(score > threshold for score in images.ood_score.tolist()) / len(images.ood_score)
        for images in found.content.sets
    }
    assert list(found.quality) == ["the original network", "with PSC"]
    text = found.to_text()
    assert f"{threshold:.4g} nats" in text and "less accurate" not in text
    assert "4000 of them, 4.3 to 5.7%" in text  # quantiles of Beta(200, 3801)
    assert found.chosen is not None and found.chosen.layers == tuple(read_bundle(shipped_bundle).manifest.layers)


def test_shares_of_decisions(shipped_bundle: Path) -> None:
    manifest = read_bundle(shipped_bundle).manifest
    scores = [0.0, 0.1, 0.2, 0.3, 3.0, 99.0, 2.0]
    images = (image_set("validation", Role.VALIDATION, scores), image_set("turned", Role.SYNTHETIC, [0.0, 99.0]))
    found = facts_of(read_bundle(shipped_bundle), Content(manifest.version, images))
    unusual = [score > found.ood_threshold for score in scores]
    unclear = [
        not ood and score > manifest.policy.ambiguity_threshold for score, ood in zip(scores, unusual, strict=True)
    ]
    accepted = [number for number in range(7) if not unusual[number] and not unclear[number]]
    assert 0 < len(accepted) < 6 and any(unclear) and any(unusual)
    assert found.shares == {
        "accepted": pytest.approx(len(accepted) / 7),
        "unclear": pytest.approx(sum(unclear) / 7),
        "unusual": pytest.approx(sum(unusual) / 7),
        "wrong": pytest.approx(sum(number % 2 for number in accepted) / len(accepted)),  # every second one is right
        "found": 0.5,
    }


def test_a_bundle_without_images_has_its_thresholds(shipped_bundle: Path) -> None:
    bundle = read_bundle(shipped_bundle)
    found = facts_of(bundle, Content(bundle.manifest.version))
    assert f"{found.ood_threshold:.4g} nats" in found.to_text() and found.measured is None


def test_content_of_another_bundle_is_refused(shipped_bundle: Path) -> None:
    with pytest.raises(BundleError, match="0123456789ab"):
        facts_of(read_bundle(shipped_bundle), content())
