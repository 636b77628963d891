"""What every task owes to the floors above."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psc_core.scoring import columns_of
from psc_core.tasks import TASKS, task_of_manifest
from psc_core.tasks.base import BaseThresholds, Outputs, Task
from tests.tasks import CLASSES, ONE_OF_EACH, drawn


@pytest.fixture(params=TASKS)
def of_task(request: pytest.FixtureRequest) -> tuple[Task, BaseThresholds]:
    return ONE_OF_EACH[request.param]


def test_a_manifest_says_of_which_task_it_is(of_task: tuple[Task, BaseThresholds]) -> None:
    task, _ = of_task
    assert task_of_manifest({"name": "psc", **task.manifest_fields()}) is type(task) is TASKS[task.name]


def test_a_manifest_of_another_task_has_none() -> None:
    assert task_of_manifest({}) is task_of_manifest({"task": []}) is None
    assert task_of_manifest({"task": "ranking"}) is None


def test_predictions_have_every_column(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    outputs = drawn(task, ("content",))
    packed = Outputs(torch.from_numpy(outputs.packed), outputs.scores, outputs.checks)
    prediction = task.prediction(packed, thresholds.decide(outputs), CLASSES)
    assert len(prediction) == 40 and {*prediction.decision} <= {*task.decision_names()}
    assert {*task.columns()} >= {*outputs.scores, "decision", "is_ood", "checks"}
    assert all(len(column) == 40 for column in columns_of(prediction, task).values())


def test_tells_predictions_apart(of_task: tuple[Task, BaseThresholds]) -> None:
    task, _ = of_task
    names, packed = drawn(task, ()).scores, torch.from_numpy(drawn(task, ()).packed)
    said, none = task.difference(Outputs(packed, names, ()), Outputs(packed.clone(), names, ()))
    assert said and float(none.abs().max()) == 0
    _, some = task.difference(Outputs(packed, names, ()), Outputs(packed + 0.01, names, ()))
    assert float(some.abs().min()) > 1e-3


def test_decides_for_every_reason(of_task: tuple[Task, BaseThresholds]) -> None:
    task, thresholds = of_task
    decisions = thresholds.decide(drawn(task, ()))
    assert len(set(task.abstentions.values())) == len(task.abstentions) > 0
    assert {*decisions.decision.tolist()} >= {*task.abstentions.values()}
    assert np.array_equal(decisions.is_ood, decisions.decision == task.abstentions["ood"])
