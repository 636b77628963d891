"""Columns of outputs and their files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from psc_core import PSC, load_model
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.scoring import columns_of, merge, write
from tests.conftest import ROOT

OF_ALL = {
    "item": "string", "epistemic": "float", "log_density": "float", "ood_score": "float", "ood_p_value": "float",
    "checks": "map<string, float ('checks')>", "is_ood": "bool", "decision": "string", "error": "string",
}  # fmt: skip
"""Arrow's names of the types of columns."""

OF_TASK = {
    "tiny_bundle": {
        "label": "string", "class_index": "int64", "confidence": "float", "probabilities": "list<element: float>",
        "predictive_entropy": "float", "prediction_set": "list<element: string>",
    },
    "angle_bundle": {
        "target": "struct<name: string, unit: string>", "mean": "float", "aleatoric": "float", "lower": "float",
        "upper": "float",
    },
}  # fmt: skip


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_checks_of_each_image(tiny_bundle: Path, tmp_path: Path, form: str) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    prediction = psc.predict(next(data.batches(3)).images)
    file = tmp_path / f"part.{form}"
    write(merge(["a", "b", "c"], [None] * 3, columns_of(prediction, psc.task)), psc.task.columns(), file)
    if form == "parquet":
        rows = [dict(each) for each in pytest.importorskip("pyarrow.parquet").read_table(file)["checks"].to_pylist()]
    else:
        rows = [json.loads(line)["checks"] for line in file.read_text().splitlines()]
    assert set(rows[0]) == {"texture", "content"} == set(psc.checks)
    for name, p_values in prediction.checks.items():
        assert [row[name] for row in rows] == pytest.approx(p_values.tolist())


@pytest.mark.parametrize("bundle", OF_TASK)
def test_types_of_columns(bundle: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    model = load_model(request.getfixturevalue(bundle), device="cpu", allow_factories=["tests.tiny:network"])
    images = next(open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=model.preprocess).batches(3)).images
    columns = merge(list("abcd"), [None, None, "damaged", None], columns_of(model.predict(images), model.task))
    write(columns, model.task.columns(), tmp_path / "part.parquet")
    written = parquet.read_schema(tmp_path / "part.parquet")
    assert {field.name: str(field.type) for field in written} == OF_ALL | OF_TASK[bundle]
