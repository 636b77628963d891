"""Predictions of every task as text, dictionaries, tables and parts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psc_core import PRESETS, load_model, open_dataset
from psc_core.errors import UsageError
from psc_core.model import FittedModel
from psc_core.tasks import TASKS
from psc_core.tasks.base import SHOWN, BasePrediction

BUNDLES = {"classification": "tiny_bundle", "regression": "angle_bundle"}


@pytest.fixture(params=TASKS, scope="session")
def model(request: pytest.FixtureRequest) -> FittedModel:
    bundle: Path = request.getfixturevalue(BUNDLES[request.param])
    return load_model(bundle, device="cpu", allow_factories=["tests.tiny:network"])


@pytest.fixture(scope="session")
def images(data_root: Path) -> torch.Tensor:
    digits = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    return next(digits.batches(30)).images


@pytest.fixture(scope="session")
def prediction(model: FittedModel, images: torch.Tensor) -> BasePrediction:
    return model.predict(images)


def test_dictionaries_are_the_answers_of_the_service(model: FittedModel, prediction: BasePrediction) -> None:
    outputs = model.outputs(prediction.outputs.packed.numpy())
    documents = prediction.decisions.documents(outputs, model.classes)
    told = prediction.to_dict()
    assert len(told) == len(documents) == 30
    assert json.loads(json.dumps(told)) == told
    for mine, answer in zip(told, documents, strict=True):
        expected = model.task.answer_type.model_validate(
            {
                name: value.tolist() if isinstance(value, np.ndarray | np.generic) else value
                for name, value in answer.items()
            }
        )
        assert model.task.answer_type.model_validate(mine) == expected
        assert mine.keys() == answer.keys()


def test_a_table_has_a_row_for_each_image(model: FittedModel, prediction: BasePrediction) -> None:
    table = prediction.to_pandas()
    assert len(table) == 30 and table["is_ood"].dtype == bool and table["ood_p_value"].dtype == np.float32
    assert table["decision"].tolist() == list(prediction.decision)
    for check, p_values in prediction.checks.items():
        assert np.array_equal(table[f"checks.{check}"], p_values.numpy())
    named = {name.split(".")[0] for name in table.columns}
    assert named | {"checks"} == {*prediction.to_dict()[0]} | {"checks"}
    assert list(prediction[:0].to_pandas().columns) == list(table.columns)


def test_a_table_needs_pandas(prediction: BasePrediction, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UsageError, match=r"pip install 'psc\[pandas\]'"):
        prediction.to_pandas()


def test_the_text_shows_the_first_images(model: FittedModel, prediction: BasePrediction) -> None:
    name = {"classification": "ClassificationPrediction", "regression": "RegressionPrediction"}[model.task.name]
    title, header, *rows, more = repr(prediction).splitlines()
    assert title.startswith(f"{name} for 30 images: ") and "decision" in header and len(rows) == SHOWN
    counts = [int(part.split()[0]) for part in title.partition(": ")[2].split(", ")]
    assert sum(counts) == 30 and more == f"… {30 - SHOWN} more"
    assert {len(row) for row in (header, *rows)} == {len(header)}
    assert repr(prediction[:1]).splitlines()[0].startswith(f"{name} for 1 image: 1 ")
    assert repr(prediction[:0]) == f"{name} for 0 images"


@pytest.mark.parametrize(
    "at", [slice(2, 5), slice(0, 30, 7), slice(None, None, -1), [4, 2], torch.tensor([1, 1]), 3, -1, np.int64(5)]
)
def test_parts(prediction: BasePrediction, at: Any) -> None:
    positions = torch.from_numpy(np.array(np.arange(30)[at])).reshape(-1)
    part = prediction[at]
    assert torch.equal(part.outputs.packed, prediction.outputs.packed[positions])
    assert part.decision == tuple(prediction.decision[index] for index in positions.tolist())
    assert part.to_dict() == [prediction.to_dict()[index] for index in positions.tolist()]


@pytest.mark.parametrize("at", [[], (), np.array([]), slice(0, 0), torch.tensor([])], ids=str)
def test_a_part_without_images(prediction: BasePrediction, at: Any) -> None:
    assert len(prediction[at]) == 0 and prediction[at].to_dict() == [] and prediction[at].decision == ()


def test_parts_by_the_numbers_that_numpy_gives(prediction: BasePrediction) -> None:
    order = np.argsort(prediction.ood_p_value.numpy())
    for at in (order[::-1], order.astype(np.uint8), order.astype(np.uint16)):
        part = prediction[at]
        assert torch.equal(part.outputs.packed, prediction.outputs.packed[torch.from_numpy(at.astype(np.int64))])
        assert np.array_equal(part.decisions.decision, prediction.decisions.decision[at])


def test_predictions_are_compared_by_identity(prediction: BasePrediction) -> None:
    assert prediction == prediction and prediction != prediction[:] and len({prediction, prediction}) == 1


def test_parts_by_a_mask_and_one_by_one(prediction: BasePrediction) -> None:
    usual = ~prediction.is_ood
    assert prediction[usual].decision == tuple(
        name for name, kept in zip(prediction.decision, usual.tolist(), strict=True) if kept
    )
    assert [len(each) for each in prediction] == [1] * 30  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        prediction[30]


def test_every_score_is_an_attribute(model: FittedModel, prediction: BasePrediction) -> None:
    for name in model.score_names:
        assert torch.equal(getattr(prediction, name), prediction.outputs[name])
    assert not hasattr(prediction, "entropi") and {*model.score_names} <= {*dir(prediction)}


def test_a_notebook_shows_the_same_table(prediction: BasePrediction) -> None:
    page = prediction._repr_html_()
    assert page.count("<tr>") == SHOWN + 1 and all(word in page for word in repr(prediction).split() if "<" not in word)
    assert "<table></table>" not in page and prediction[:0]._repr_html_()
