"""What is known of a classifier's bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.bundle.io import Bundle, read_bundle
from psc_core.report.content import Content, Role
from psc_core.report.facts import facts_of
from psc_core.tasks.classification.policy import unreachable_entropy
from tests.psc_core.report.support import image_set


def test_warns_where_psc_loses_accuracy(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    images = image_set("validation", Role.VALIDATION, [0.0] * 3)
    images.quality["psc"]["accuracy"], images.quality["base"]["accuracy"] = 0.90, 0.93  # type: ignore[index]
    found = facts_of(read_bundle(shipped_bundle), Content(version, (images,)))
    assert "less accurate than the network's own by 0.030; --predictions base" in found.to_text()


@pytest.mark.parametrize("reachable", [True, False])
def test_says_whether_an_image_can_be_ambiguous(shipped_bundle: Path, reachable: bool) -> None:
    bundle = read_bundle(shipped_bundle)
    policy = bundle.manifest.policy.model_copy(
        update={"ambiguity_threshold": 0.5 if reachable else unreachable_entropy(10)}
    )
    risk = {"promised": 0.01, "confidence": 0.95, "threshold": 0.5 if reachable else None, "nearest": 0.03}
    changes = {"metrics": {**bundle.manifest.metrics, "risk": risk}, "policy": policy}
    manifest = bundle.manifest.model_copy(update=changes)
    found = facts_of(Bundle(bundle.path, manifest, bundle.parts), Content(manifest.version))
    assert found.limits == {"entropies": policy.model_dump()["ambiguity_threshold"] if reachable else None}
    assert ("ambiguous: predictive entropy above" in found.to_text()) == reachable
    assert ("ambiguous: none\n" in found.to_text()) == (not reachable)
    warned = (
        "warning: no image is called ambiguous: no entropy threshold keeps the error rate at 0.01 with 95% confidence"
    )
    assert (f"{warned}; 0.03 is the nearest that one keeps: --risk 0.03," in found.to_text()) == (not reachable)


@pytest.mark.parametrize(("threshold", "limit"), [(0.39, 0.39), (3.0, None)])
def test_a_threshold_that_the_images_do_not_show_decides_all_the_same(
    shipped_bundle: Path, threshold: float, limit: float | None
) -> None:
    bundle = read_bundle(shipped_bundle)
    policy = bundle.manifest.policy.model_copy(update={"ambiguity_threshold": threshold})
    risk = {"promised": 0.01, "confidence": 0.95, "threshold": None, "nearest": 0.03}
    changes = {"metrics": {**bundle.manifest.metrics, "risk": risk}, "policy": policy}
    manifest = bundle.manifest.model_copy(update=changes)
    found = facts_of(Bundle(bundle.path, manifest, bundle.parts), Content(manifest.version))
    assert found.limits == {"entropies": limit}
    assert ("no image is called ambiguous: no entropy is above 3 nats" in found.to_text()) == (limit is None)
    said = "keeps the error rate at 0.01 with 95% confidence; the ambiguity threshold of 0.39 nats is that of an"
    assert (said in found.to_text()) == (limit is not None)
