"""Decisions of every task on some of the images."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from psc_core.answers import ASKED_FOR
from psc_core.tasks import TASKS
from tests.tasks import CLASSES, ONE_OF_EACH, drawn


@pytest.mark.parametrize("at", [slice(2, 5), [4, 2, 2], np.array([7]), np.arange(40) % 3 == 0, []], ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_decides_images_one_by_one(task: str, at: Any) -> None:
    of, thresholds = ONE_OF_EACH[task]
    outputs = drawn(of, ())
    decisions, positions = thresholds.decide(outputs), np.arange(40)[at].tolist()
    some = decisions.at(at)
    assert type(some) is type(decisions) and len(some) == len(positions)
    for each in fields(decisions):
        assert getattr(some, each.name).tolist() == [getattr(decisions, each.name)[k].tolist() for k in positions]
    assert list(some.labels(CLASSES)) == [decisions.labels(CLASSES)[k] for k in positions]


@pytest.mark.parametrize("checks", [(), ("texture", "content")], ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_gives_a_value_of_every_field_that_no_request_must_ask_for(task: str, checks: tuple[str, ...]) -> None:
    of, thresholds = ONE_OF_EACH[task]
    outputs = drawn(of, checks)
    columns = thresholds.decide(outputs).columns(outputs, CLASSES)
    assert {*columns} == {*of.answer_type.model_fields} - {*ASKED_FOR} - (set() if checks else {"checks"})
    assert {len(column) for column in columns.values()} == {40}
    assert all(np.array_equal(columns[name], outputs[name]) for name in outputs.scores)
    if checks:
        assert columns["checks"] == [dict(zip(checks, row, strict=True)) for row in outputs.check_p_values]


@pytest.mark.parametrize("task", TASKS)
def test_names_the_decisions_of_an_answer(task: str) -> None:
    of, thresholds = ONE_OF_EACH[task]
    decisions = thresholds.decide(drawn(of, ()))
    assert decisions.decision_names == of.decision_names()
