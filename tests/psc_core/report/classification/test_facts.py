"""What is known of a classifier's bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from psc_core.answers import ACCEPTS_NOTHING
from psc_core.bundle import Bundle, read_bundle
from psc_core.report.content import Content, Role, facts_of
from tests.psc_core.report.support import image_set


def test_warns_where_psc_loses_accuracy(shipped_bundle: Path) -> None:
    version = read_bundle(shipped_bundle).manifest.version
    images = image_set("validation", Role.VALIDATION, [0.0] * 3)
    images.quality["psc"]["accuracy"], images.quality["original"]["accuracy"] = 0.90, 0.93  # type: ignore[index]
    found = facts_of(read_bundle(shipped_bundle), Content(version, (images,)))
    assert "less accurate than the network's own by 0.030; --predictions original" in found.to_text()


@pytest.mark.parametrize(
    ("threshold", "limit", "line"),
    [(0.5, 0.5, "predictive entropy above 0.5 nats"), (5.0, None, "none"), (ACCEPTS_NOTHING, -1, "every other image")],
)
def test_says_which_images_are_ambiguous(
    shipped_bundle: Path, threshold: float, limit: float | None, line: str
) -> None:
    bundle = read_bundle(shipped_bundle)
    policy = bundle.manifest.policy.model_copy(update={"ambiguity_threshold": threshold, "risk": None})
    manifest = bundle.manifest.model_copy(update={"policy": policy})
    found = facts_of(Bundle(bundle.path, manifest, bundle.parts), Content(manifest.version))
    assert found.limits == {"entropies": limit}
    assert f"\nambiguous: {line}\n" in f"{found.to_text()}\n"
    assert ("no image is called ambiguous" in found.to_text()) == (limit is None)
    assert ("NOTHING IS ACCEPTED" in found.to_text().splitlines()[0]) == (threshold < 0)
