"""What every task owes to the floors above: decisions, tensors, columns, predictions."""

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from psc_core.answers import ASKED_FOR, ClassificationPolicy, RegressionPolicy, Target, scores_of
from psc_core.errors import UsageError
from psc_core.model import FittedModel
from psc_core.scoring import columns_of
from psc_core.tasks import TASKS, task_of_manifest
from psc_core.tasks.base import SHOWN, BasePrediction, FloatArray, Outputs, Task, pack
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression
from tests.decisions import Decider
from tests.opened import loaded, opened

CLASSES = ("a", "b", "c")
ONE_OF_EACH: dict[str, tuple[Task, Decider]] = {
    "regression": (
        Regression(target=Target(name="angle", unit="degrees")),
        Decider(RegressionPolicy(alpha=0.05, max_width=2.0, coverage=0.9), 2.0),
    ),
    "classification": (
        Classification(),
        Decider(ClassificationPolicy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9), 0.2),
    ),
}
"""A task of each name, and what decides on it."""


def drawn(task: Task, checks: tuple[str, ...]) -> Outputs[FloatArray]:
    """Outputs of 40 images."""
    names = task.heads[next(iter(task.heads))].score_names
    columns = len(names) + task.probabilities(CLASSES) + len(checks)
    return Outputs(np.random.default_rng(0).random((40, columns), np.float32), names, checks)


@pytest.fixture(params=TASKS)
def of_task(request: pytest.FixtureRequest) -> tuple[Task, Decider]:
    return ONE_OF_EACH[request.param]


def test_a_manifest_says_of_which_task_it_is(of_task: tuple[Task, Decider]) -> None:
    task, _ = of_task
    assert task_of_manifest({"name": "psc", **task.manifest_fields()}) is type(task) is TASKS[task.name]


def test_a_manifest_of_another_task_has_none() -> None:
    assert task_of_manifest({}) is task_of_manifest({"task": []}) is None
    assert task_of_manifest({"task": "ranking"}) is None


def test_predictions_have_every_column(of_task: tuple[Task, Decider]) -> None:
    task, decider = of_task
    outputs = drawn(task, ("content",))
    packed = Outputs(torch.from_numpy(outputs.packed), outputs.scores, outputs.checks)
    prediction = task.prediction(packed, decider.decide(outputs), CLASSES)
    assert len(prediction) == 40 and {*prediction.decision} <= {*task.decision_names()}
    assert {*task.columns()} >= {*outputs.scores, "decision", "is_ood", "checks"}
    assert all(len(column) == 40 for column in columns_of(prediction, task).values())


def test_tells_predictions_apart(of_task: tuple[Task, Decider]) -> None:
    task, _ = of_task
    names, packed = drawn(task, ()).scores, torch.from_numpy(drawn(task, ()).packed)
    said, none = task.difference(Outputs(packed, names, ()), Outputs(packed.clone(), names, ()))
    assert said and float(none.abs().max()) == 0
    _, some = task.difference(Outputs(packed, names, ()), Outputs(packed + 0.01, names, ()))
    assert float(some.abs().min()) > 1e-3


def test_decides_for_every_reason(of_task: tuple[Task, Decider]) -> None:
    task, decider = of_task
    decisions = decider.decide(drawn(task, ()))
    assert decisions.decision_names == task.decision_names()
    assert len(set(task.abstentions.values())) == len(task.abstentions) > 0
    assert {*decisions.decision.tolist()} >= {*task.abstentions.values()}
    assert np.array_equal(decisions.is_ood, decisions.decision == task.abstentions["ood"])


DTYPES = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}


@pytest.mark.parametrize("checks", [(), ("texture", "content")])
def test_gives_every_tensor_of_the_protocol(of_task: tuple[Task, Decider], checks: tuple[str, ...]) -> None:
    task, decider = of_task
    outputs = drawn(task, checks)
    decisions = decider.decide(outputs)
    for name, datatype in task.tensors.items():
        values, shape = task.tensor(name, outputs, decisions, CLASSES), task.tensor_shape(name, CLASSES, checks)
        if datatype == "BYTES":
            assert isinstance(values, list) and len(values) == 40 and shape == []
        else:
            assert isinstance(values, np.ndarray)
            assert (values.shape, values.dtype) == ((40, *shape), DTYPES[datatype])


def test_counts_labels(of_task: tuple[Task, Decider]) -> None:
    task, decider = of_task
    decisions = decider.decide(drawn(task, ()))
    labels, indices = task.metric_labels(CLASSES), decisions.label_index.tolist()
    assert len(indices) == 40 and {*indices} <= {*range(len(labels))}


@pytest.mark.parametrize("at", [slice(2, 5), [4, 2, 2], np.array([7]), np.arange(40) % 3 == 0, []], ids=str)
def test_decides_images_one_by_one(of_task: tuple[Task, Decider], at: Any) -> None:
    task, decider = of_task
    decisions, positions = decider.decide(drawn(task, ())), np.arange(40)[at].tolist()
    some = decisions.at(at)
    assert type(some) is type(decisions) and len(some) == len(positions)
    for each in fields(decisions):
        assert getattr(some, each.name).tolist() == [getattr(decisions, each.name)[k].tolist() for k in positions]
    assert list(some.labels(CLASSES)) == [decisions.labels(CLASSES)[k] for k in positions]


@pytest.mark.parametrize("checks", [(), ("texture", "content")], ids=str)
def test_gives_every_field_that_no_request_must_ask_for(of_task: tuple[Task, Decider], checks: tuple[str, ...]) -> None:
    task, decider = of_task
    outputs = drawn(task, checks)
    columns = decider.decide(outputs).columns(outputs, CLASSES)
    assert {*columns} == {*task.answer_type.model_fields} - {*ASKED_FOR} - (set() if checks else {"checks"})
    assert {len(column) for column in columns.values()} == {40}
    assert all(np.array_equal(columns[name], outputs[name]) for name in outputs.scores)
    if checks:
        assert columns["checks"] == [dict(zip(checks, row, strict=True)) for row in outputs.check_p_values]


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("checks", [(), ("texture", "content")])
def test_pack_and_read_back(task: str, checks: tuple[str, ...]) -> None:
    names = scores_of(TASKS[task].answer_type)
    scores, probabilities, p_values = {name: torch.rand(3) for name in names}, torch.rand(3, 4), torch.rand(3, 2)
    outputs = Outputs(pack(names, scores, probabilities, [p_values] if checks else ()), names, checks)
    assert len(outputs) == 3
    assert torch.equal(outputs.probabilities, probabilities)
    assert torch.equal(outputs.check_p_values, p_values[:, : len(checks)])
    for name, values in scores.items():
        assert torch.equal(outputs[name], values)


BUNDLES = {"classification": "tiny_bundle", "regression": "angle_bundle"}


@pytest.fixture(params=TASKS, scope="session")
def model(request: pytest.FixtureRequest) -> FittedModel:
    bundle: Path = request.getfixturevalue(BUNDLES[request.param])
    return loaded(bundle)


@pytest.fixture(scope="session")
def images() -> torch.Tensor:
    digits = opened("mnist")
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
        assert model.task.answer_type.model_validate(mine) == expected and expected.cells()
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


def test_text_and_notebook_show_the_first_images(prediction: BasePrediction) -> None:
    title, _, *rows, more = repr(prediction).splitlines()
    counts = [int(part.split()[0]) for part in title.partition(": ")[2].split(", ")]
    assert "30 images" in title and sum(counts) == 30 and len(rows) == SHOWN and str(30 - SHOWN) in more
    page = prediction._repr_html_()
    assert page.count("<tr>") == SHOWN + 1 and all(word in page for word in repr(prediction).split() if "<" not in word)
    assert "0 images" in repr(prediction[:0]) and prediction[:0]._repr_html_()


def test_text_and_notebook_show_an_image_without_finite_outputs(model: FittedModel, prediction: BasePrediction) -> None:
    packed = prediction.outputs.packed.clone()
    packed[1] = torch.nan
    outputs = replace(prediction.outputs, packed=packed)
    shown = replace(prediction, outputs=outputs, decisions=model.decide(model.outputs(packed.numpy())))
    assert "nan" in repr(shown) and "nan" in shown._repr_html_()


@pytest.mark.parametrize(
    "at",
    [
        slice(2, 5), slice(0, 30, 7), slice(None, None, -1), [4, 2], torch.tensor([1, 1]), 3, -1, np.int64(5),
        np.arange(30)[::-1], np.arange(30).astype(np.uint8), np.arange(30, dtype=np.uint16), np.arange(30) % 3 == 0,
        torch.arange(30) % 4 == 0, [], (), np.array([]), slice(0, 0), torch.tensor([]),
    ],
    ids=str,
)  # fmt: skip
def test_parts(prediction: BasePrediction, at: Any) -> None:
    is_empty = not isinstance(at, int | np.integer | slice) and len(at) == 0
    positions = torch.from_numpy(np.array(np.arange(30)[[] if is_empty else at])).reshape(-1).long()
    part = prediction[at]
    assert torch.equal(part.outputs.packed, prediction.outputs.packed[positions])
    assert part.decision == tuple(prediction.decision[index] for index in positions.tolist())
    assert part.to_dict() == [prediction.to_dict()[index] for index in positions.tolist()]


def test_a_prediction_is_a_sequence_compared_by_identity(prediction: BasePrediction) -> None:
    assert prediction == prediction and prediction != prediction[:] and len({prediction, prediction}) == 1
    assert [len(each) for each in prediction] == [1] * 30  # type: ignore[attr-defined]
    with pytest.raises(IndexError):
        prediction[30]


def test_every_score_is_an_attribute(model: FittedModel, prediction: BasePrediction) -> None:
    for name in model.score_names:
        assert torch.equal(getattr(prediction, name), prediction.outputs[name])
    assert not hasattr(prediction, "entropi") and {*model.score_names} <= {*dir(prediction)}
