"""What the service asks of every task."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from psc_core.tasks import TASKS
from psc_core.tasks.base import BaseThresholds, Task
from tests.tasks import CLASSES, ONE_OF_EACH, drawn

DTYPES = {"FP32": np.float32, "BOOL": np.bool_, "INT64": np.int64}


@pytest.fixture(params=TASKS)
def of_task(request: pytest.FixtureRequest) -> tuple[Task, BaseThresholds]:
    return ONE_OF_EACH[request.param]


@pytest.mark.parametrize("checks", [(), ("texture", "content")])
def test_gives_every_tensor_of_the_protocol(of_task: tuple[Task, BaseThresholds], checks: tuple[str, ...]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, checks)
    decisions = thresholds.decide(outputs)
    for name, datatype in task.tensors.items():
        values, shape = task.tensor(name, outputs, decisions, CLASSES), task.tensor_shape(name, CLASSES, checks)
        if datatype == "BYTES":
            assert isinstance(values, list) and len(values) == 40 and shape == []
        else:
            assert isinstance(values, np.ndarray)
            assert (values.shape, values.dtype) == ((40, *shape), DTYPES[datatype])


def test_documents_are_answers(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, ("content",))
    documents = thresholds.decide(outputs).documents(outputs, CLASSES)
    answers = [
        task.answer_type.model_validate({name: _plain(value) for name, value in each.items()}) for each in documents
    ]
    assert len(answers) == 40 and all(each.cells() for each in answers)


def test_counts_labels(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    decisions = thresholds.decide(drawn(task, ()))
    labels, indices = task.metric_labels(CLASSES), decisions.label_index.tolist()
    assert len(indices) == 40 and {*indices} <= {*range(len(labels))}


def _plain(value: Any) -> Any:
    """A value as JSON gives it."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value
