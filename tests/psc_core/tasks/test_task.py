"""What every task owes to the floors above."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from psc_core.target import Target
from psc_core.tasks import TASKS
from psc_core.tasks.classification import calibration as classification
from psc_core.tasks.classification.policy import Policy
from psc_core.tasks.classification.task import Classification
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.regression import calibration as regression
from psc_core.tasks.regression.policy import ValuePolicy
from psc_core.tasks.regression.task import Regression
from psc_core.tasks.task import Task, task_type, task_type_of, task_types

CLASSES = ("a", "b", "c")
ONE_OF_EACH: dict[str, tuple[Task, Any]] = {
    "regression": (
        Regression(target=Target(name="angle", unit="degrees")),
        regression.Thresholds(ValuePolicy(alpha=0.05, max_width=2.0, coverage=0.9), 0.05, 2.0),
    ),
    "classification": (
        Classification(),
        classification.Thresholds(Policy(alpha=0.05, ambiguity_threshold=0.5, coverage=0.9), 0.05, 0.2),
    ),
}
"""A task of each name, and thresholds of it."""

DTYPES = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}


@pytest.fixture(params=TASKS)
def of_task(request: pytest.FixtureRequest) -> tuple[Task, Any]:
    return ONE_OF_EACH[request.param]


def drawn(task: Task, gates: tuple[str, ...]) -> Outputs[FloatArray]:
    """Outputs of 40 images."""
    names = task.heads[next(iter(task.heads))].score_names
    columns = len(names) + task.probabilities(CLASSES) + len(gates)
    return Outputs(np.random.default_rng(0).random((40, columns), np.float32), names, gates)


def test_a_manifest_says_of_which_task_it_is(of_task: tuple[Task, Any]) -> None:
    task, _ = of_task
    assert task_type_of({"name": "psc", **task.manifest_fields()}) is type(task) is task_type(task.name)


def test_a_manifest_that_says_nothing_is_of_the_last_task() -> None:
    assert task_type_of({}) is task_type(TASKS[-1]) is task_types()[0]
    assert task_type_of({"task": "ranking"}) is None


@pytest.mark.parametrize("gates", [(), ("texture", "kind")])
def test_gives_every_tensor_of_the_protocol(of_task: tuple[Task, Any], gates: tuple[str, ...]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, gates)
    decisions = task.decide(outputs, thresholds)
    for name, datatype in task.tensors.items():
        values, shape = task.tensor(name, outputs, decisions, CLASSES), task.tensor_shape(name, CLASSES, gates)
        if datatype == "BYTES":
            assert isinstance(values, list) and len(values) == 40 and shape == []
        else:
            assert isinstance(values, np.ndarray)
            assert (values.shape, values.dtype) == ((40, *shape), DTYPES[datatype])


def test_documents_are_answers(of_task: tuple[Task, Any]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, ("kind",))
    decisions = task.decide(outputs, thresholds)
    documents = task.documents(outputs, decisions, CLASSES)
    answers = [task.answer.model_validate({name: _plain(value) for name, value in each.items()}) for each in documents]
    assert len(answers) == 40 and all(each.cells() for each in answers)
    assert set(task.columns()) >= {*outputs.scores, "decision", "is_ood", "gates"}


def test_tells_predictions_apart(of_task: tuple[Task, Any]) -> None:
    task, _ = of_task
    names, packed = drawn(task, ()).scores, torch.from_numpy(drawn(task, ()).packed)
    said, none = task.difference(Outputs(packed, names, ()), Outputs(packed.clone(), names, ()))
    assert said and float(none.abs().max()) == 0
    _, some = task.difference(Outputs(packed, names, ()), Outputs(packed + 0.01, names, ()))
    assert float(some.abs().min()) > 1e-3


def test_counts_labels_and_abstentions(of_task: tuple[Task, Any]) -> None:
    task, thresholds = of_task
    decisions = task.decide(drawn(task, ()), thresholds)
    labels = task.metric_labels(CLASSES)
    assert len(task.label_index(decisions)) == 40 and {*task.label_index(decisions).tolist()} <= {*range(len(labels))}
    assert len(set(task.abstentions.values())) == len(task.abstentions) > 0
    assert {*decisions.decision.tolist()} >= {*task.abstentions.values()}


def _plain(value: Any) -> Any:
    """A value as JSON gives it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
