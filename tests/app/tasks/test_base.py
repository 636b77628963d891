"""What the service asks of every task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from app.tasks.base import served_task, tensor_names
from psc_core.tasks import TASKS
from psc_core.tasks.decide import BaseThresholds
from psc_core.tasks.task import Task
from tests.tasks import CLASSES, ONE_OF_EACH, drawn

DTYPES = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}


@pytest.fixture(params=TASKS)
def of_task(request: pytest.FixtureRequest) -> tuple[Task, BaseThresholds]:
    return ONE_OF_EACH[request.param]


@pytest.mark.parametrize("gates", [(), ("texture", "kind")])
def test_gives_every_tensor_of_the_protocol(of_task: tuple[Task, BaseThresholds], gates: tuple[str, ...]) -> None:
    task, thresholds = of_task
    outputs, served = drawn(task, gates), served_task(task)
    decisions = thresholds.decide(outputs)
    assert {*served.tensors} <= {*tensor_names()}
    for name, datatype in served.tensors.items():
        values, shape = served.tensor(name, outputs, decisions, CLASSES), served.tensor_shape(name, CLASSES, gates)
        if datatype == "BYTES":
            assert isinstance(values, list) and len(values) == 40 and shape == []
        else:
            assert isinstance(values, np.ndarray)
            assert (values.shape, values.dtype) == ((40, *shape), DTYPES[datatype])


def test_documents_are_answers(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, ("kind",))
    documents = served_task(task).documents(outputs, thresholds.decide(outputs), CLASSES)
    answers = [
        task.answer_type.model_validate({name: _plain(value) for name, value in each.items()}) for each in documents
    ]
    assert len(answers) == 40 and all(each.cells() for each in answers)


def test_counts_labels(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    served, decisions = served_task(task), thresholds.decide(drawn(task, ()))
    labels, indices = served.metric_labels(CLASSES), served.label_index(decisions).tolist()
    assert len(indices) == 40 and {*indices} <= {*range(len(labels))}


def _plain(value: Any) -> Any:
    """A value as JSON gives it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
