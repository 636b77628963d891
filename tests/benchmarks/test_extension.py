"""Densities before and after they are extended, for a camera."""

from __future__ import annotations

import pytest
import torch

from benchmarks.extension import CAMERAS, MEASURED, cell, fragment, quality, seen
from psc_core import PRESETS, PSC, open_dataset
from tests.conftest import ROOT, SHIPPED_BUNDLE


def test_another_camera_and_what_it_changes() -> None:
    digits = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    grey = seen(digits, torch.arange(40), CAMERAS["black is a little grey"])
    images = next(grey.batches(40)).images
    assert int(images.min()) == 8 and grey.labels.tolist() == digits.first_labels()[:40].tolist()
    model = PSC.load(SHIPPED_BUNDLE, device="cpu")
    own = next(digits.subset(torch.arange(40)).batches(40)).images
    found = quality(model, own, own, 255 - own)
    assert (
        found["auroc"] == pytest.approx(0.5) and found["alarms"] == found["found"] < 0.3 and found["auroc_before"] > 0.9
    )


def test_the_table_has_a_row_for_each_camera_and_bundle() -> None:
    measured = [{**dict.fromkeys(MEASURED, 0.5), "times": times} for times in (1, 10)]
    parts = {
        f"as-it-was-{each['times']}": {
            "camera": "as it was",
            "labels": 5,
            "ways": {"as fitted": {**each, "times": None}, "with --extend-density": each},
        }
        for each in measured
    }
    environment = dict.fromkeys(("device", "cpus", "threads", "torch", "python", "psc", "commit", "date"), "x")
    origin = {"command": "c", "environment": environment}
    text = fragment({"scale": "cpu", "parts": {name: {**origin, "result": part} for name, part in parts.items()}})
    assert "| as it was | with --extend-density | 50.0 ± 0.0 | 50.0 ± 0.0 | 0.5000 | 0.5000 | 1, 10 |" in text
    assert "| as it was | as fitted | 50.0 ± 0.0 | 50.0 ± 0.0 | 0.5000 | 0.5000 |  |" in text
    assert cell("auroc", [0.5, 0.25]) == "0.3750"
