"""One entrance for the models of all tasks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psc_core import load_model, open_dataset
from psc_core.evaluation.evaluate import evaluate


@pytest.mark.parametrize(("bundle", "data"), [("tiny_bundle", "dirty-mnist"), ("angle_bundle", "rotated-mnist")])
def test_a_model_of_any_task_is_measured(
    bundle: str, data: str, data_root: Path, request: pytest.FixtureRequest
) -> None:
    model = load_model(request.getfixturevalue(bundle), device="cpu", allow_factories=["tests.tiny:network"])
    known, shirts = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=model.preprocess).subset(torch.arange(90))
        for name in (data, "fashion-mnist")
    )
    found = evaluate(model, known, {"shirts": shirts}, batch_images=40)
    assert (found.report.id_name, found.report.images) == (known.name, 90)
    assert found.report.model["version"] == model.version and set(found.outside) == {"shirts"}
    prediction = model.predict(next(shirts.batches(90)).images)
    assert found.report.to_json()["flagged"]["shirts"] == pytest.approx(float(prediction.is_ood.double().mean()))
    assert found.report.to_text().strip() in found.report.to_markdown() or "## Rates" in found.report.to_markdown()
