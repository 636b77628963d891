"""Recalibration over and over, on scores that were computed once."""

from __future__ import annotations

import pytest
import torch

from benchmarks.recalibration import AS_FITTED, MEASURED, Seen, accepted, calibrated, cell, fragment, informative, kept
from psc_core import PRESETS, PSC, open_dataset
from psc_core.calibrate import settings_of
from psc_core.tasks.outputs import Outputs
from tests.conftest import ROOT, SHIPPED_BUNDLE


@pytest.fixture(scope="module")
def model() -> PSC:
    return PSC.load(SHIPPED_BUNDLE, device="cpu")


@pytest.fixture(scope="module")
def seen(model: PSC) -> Seen:
    images = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    images = images.subset(torch.arange(200))
    return Seen(images, model.compute(next(images.batches(200)).images))


def test_what_is_measured_is_what_the_bundle_decides(model: PSC, seen: Seen) -> None:
    found = kept(model, model.calibration, model.policy, seen)
    prediction = model.predict(next(seen.images.batches(200)).images)
    is_ood = [decision == "abstain_ood" for decision in prediction.decision]
    held = [
        str(label) in held
        for label, held in zip(seen.images.first_labels().tolist(), prediction.prediction_set, strict=True)
    ]
    assert found["alarms"] == pytest.approx(sum(is_ood) / 200) and found["coverage"] == pytest.approx(sum(held) / 200)
    calibration, policy = calibrated(seen, settings_of(model, {}))
    again = kept(model, calibration, policy, seen)
    assert again["alarms"] == pytest.approx(10 / 201, abs=0.006)
    assert policy.model_dump()["risk"] in (None, 0.05, 0.1, 0.15, 0.2)  # 200 images show no 1 %.
    passed = accepted(model, seen.outputs)
    assert [prediction.decision[i] for i in passed] == ["accept"] * len(passed)
    assert len(passed) == prediction.decision.count("accept")


def test_informative_images_are_unusual_or_uncertain() -> None:
    packed = torch.tensor([[0.0, 5.0], [9.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    order = informative(Outputs(packed, ["ood_score", "predictive_entropy"], ()))
    assert order.tolist() == [0, 1, 3, 2]


def test_the_table_says_how_far_a_single_one_strays() -> None:
    assert cell([0.04, 0.06]) == "5.00 ± 1.00 (1.4)"
    ways = {how: {name: [0.04, 0.06] for name in MEASURED} for how in ("audit, 500", AS_FITTED, "audit, 50")}
    part = {"promised": {"alpha": 0.05, "coverage": 0.95, "risk": 0.01}, "repeats": 2, "rows": {"blurred": ways}}
    environment = dict.fromkeys(("device", "cpus", "threads", "torch", "python", "psc", "commit", "date"), "x")
    origin = {"command": "c", "environment": environment}
    text = fragment({"scale": "cpu", "parts": {"digits": {**origin, "result": part}}})
    rows = [line.split(" | ")[1] for line in text.splitlines() if line.startswith("| blurred")]
    assert rows == [AS_FITTED, "audit, 50", "audit, 500"] and "guaranteed are 5% false alarms" in text
