"""Calibration on the calibration split alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from psc_core import PSC, FitSettings, fit_projection, fit_psc, measure_collapse
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.data.sources import ArraySource
from psc_core.projection.fit.report import FittedProjection
from psc_core.tasks.head import Head

SETTINGS = FitSettings(device="cpu")


def test_the_density_alone_is_calibrated(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", settings=SETTINGS).candidate("4")
    psc = fit_psc(net, candidate, projection, train, val, head="duq", ood_score="density", settings=SETTINGS)
    calibrates = split_validation(val, SETTINGS.seed)[1]
    found = psc.predict(next(calibrates.batches(len(calibrates))).images)
    assert torch.equal(found.ood_score, -found.log_density)
    torch.testing.assert_close(psc.calibration.ood_scores, found.ood_score.sort().values)
    n = len(found)  # of n calibration images themselves, the k-th strangest has the p-value (k + 1) / (n + 1)
    assert sorted((found.ood_p_value * (n + 1)).round().int().tolist()) == list(range(2, n + 2))


def test_calibration_split_selects_nothing(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    calibrates = torch.isin(val.indices, split_validation(val, SETTINGS.seed)[1].indices)
    other = replace(val, labels=torch.where(calibrates, (val.labels + 1) % 10, val.labels))
    collapse, other_collapse = (
        measure_collapse(net, train, data, layers="^4$", settings=SETTINGS) for data in (val, other)
    )
    assert collapse == other_collapse
    candidate = collapse.candidate("4")
    assert fit_projection(net, candidate, train, other, settings=SETTINGS).report.choice == projection.report.choice
    one, two = (
        fit_psc(net, candidate, projection, train, data, head="duq", settings=SETTINGS).pipeline
        for data in (val, other)
    )
    assert isinstance(one.scorer.head, Head) and isinstance(two.scorer.head, Head)
    assert one.scorer.head.record == two.scorer.head.record
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def test_other_calibration_images_change_nothing_but_the_calibration(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    """So its scores and a new image's are exchangeable, however many gates are combined, and alpha is kept."""
    assert isinstance(val.source, ArraySource)
    images, calibrates = val.source.images.copy(), split_validation(val, SETTINGS.seed)[1].indices.numpy()
    images[calibrates] = 255 - images[calibrates]
    one, two = (
        PSC.fit(net, train, data, head="duq", device="cpu", max_images=600).pipeline
        for data in (val, replace(val, source=ArraySource(images)))
    )
    assert one.gates is not None and two.gates is not None and len(one.gates.names) > 1
    assert one.gates.names == two.gates.names and one.scorer.backbone.layers == two.scorer.backbone.layers
    fitted, other = one.state_dict(), two.state_dict()
    changed = {name for name, tensor in fitted.items() if not torch.equal(tensor, other[name])}
    assert fitted.keys() == other.keys() and changed == {"gates.calibration"}
    assert not torch.equal(one.calibration_scores, two.calibration_scores)


def test_risk_reaches_the_ambiguity_threshold(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for found in (0.3, None):
        monkeypatch.setattr(
            "psc_core.tasks.classification.fit.task.ambiguity_threshold", lambda *_, risk, found=found: found and risk
        )
        psc = fit_psc(net, Candidate(("4",), ""), projection, train, val, head="duq", risk=0.3, settings=SETTINGS)
        risk = psc.report["metrics"]["risk"]
        nearest = {} if found else {"nearest": 0.31, "nearest_threshold": risk.get("nearest_threshold")}
        assert risk == {"promised": 0.3, "confidence": 0.95, "threshold": found, **nearest}
        assert psc.policy.ambiguity_threshold == pytest.approx(found or risk["nearest_threshold"])
        assert found or risk["nearest_threshold"] < math.log(10)
        notes = psc.policy.notes(psc.classes, psc.report["metrics"])
        assert ["the ambiguity threshold keeps 0.31" in note for note in notes] == [True] * (not found)
