"""Modules that are found by a task's name offer the same names, with the same arguments, for every task."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from psc_core.tasks import TASKS, module_of
from psc_core.tasks.task import task_type
from tests.conftest import ROOT

OFFERS: dict[str, tuple[str, ...]] = {
    "psc_core.tasks.{}": ("NOUN",),
    "psc_core.tasks.{}.answer": ("DECISIONS", "RESPONSE", "SCORES"),
    "psc_core.tasks.{}.decide": ("Decisions", "Thresholds"),
    "psc_core.tasks.{}.calibration": ("Calibration",),
    "psc_core.tasks.{}.heads": ("HEADS",),
    "psc_core.tasks.{}.task": ("TASK",),
    "psc_core.tasks.{}.fit.head": ("FITS",),
    "psc_core.tasks.{}.fit.task": ("FIT",),
    "app.tasks.{}": ("SERVED",),
    "psc_core.evaluation.{}": (
        "open_images", "open_baselines", "plain_network", "score_images", "quality_of", "compare",
    ),
    "psc_core.report.{}.facts": ("DIGITS", "RECORDED", "limits_of", "policy_lines", "warnings_of", "accuracy_lost"),
    "psc_core.report.{}.figures": ("draw",),
    "psc_core.report.{}.sets": ("SET", "scored_set", "made_up_set", "pictures_of"),
    "psc_core.report.{}.words": ("TEXTS", "NO_LIMIT", "COLUMNS", "GLOSSARY", "TEST_IMAGES"),
}  # fmt: skip
"""Modules by the place of the task's name, and what each offers in this order."""


def arguments(function: Any) -> list[tuple[str, Any, Any]] | None:
    """Names, kinds and defaults of a function's arguments; None of what is no function."""
    if not inspect.isfunction(function):
        return None
    return [(each.name, each.kind, each.default) for each in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("module", OFFERS)
@pytest.mark.parametrize("task", TASKS)
def test_offers_the_same_names_in_the_same_order(task: str, module: str) -> None:
    found, first = module_of(task, module), module_of(TASKS[-1], module)
    own = [name for name in vars(found) if name in OFFERS[module]]
    assert own == list(OFFERS[module])
    assert [arguments(getattr(found, name)) for name in own] == [arguments(getattr(first, name)) for name in own]


@pytest.mark.parametrize("task", TASKS)
def test_what_users_see_begins_with_the_task(task: str) -> None:
    of = task_type(task)
    seen = {
        "Answer": of.answer_type,
        "Policy": of.policy_type,
        "Response": of.response_type,
        "Prediction": of.prediction_type,
    }
    assert [each.__name__ for each in seen.values()] == [task.capitalize() + role for role in seen]


def test_knows_every_module_that_is_found_by_name() -> None:
    text = "\n".join(file.read_text() for package in ("psc_core", "app") for file in (ROOT / package).rglob("*.py"))
    named = set(re.findall(r'"((?:psc_core|app)\.[\w.]*\{\}[\w.]*)"', text))
    assert len(named) >= 7 and named <= {*OFFERS}
