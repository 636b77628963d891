"""Modules that bear a task's name offer the same names, in the same order, with the same parameters."""

from __future__ import annotations

import inspect
from types import ModuleType

import pytest

from psc_core.tasks import TASKS, module_of

OFFERED = {
    "psc_core.evaluation.{}": (
        "open_images", "check_images", "open_baselines", "own_network", "score_images", "quality_of", "compare",
    ),
    "psc_core.report.{}.sets": ("SET", "scored_set", "made_up_set", "pictures_of"),
    "psc_core.report.{}.facts": ("DIGITS", "RECORDED", "limits_of", "policy_lines", "warnings_of", "accuracy_lost"),
    "psc_core.report.{}.figures": ("draw",),
    "psc_core.report.{}.words": ("TEXTS", "NO_LIMIT", "COLUMNS", "GLOSSARY", "TEST_IMAGES"),
}  # fmt: skip
"""What code outside of these modules asks for."""


def offered(module: ModuleType, names: tuple[str, ...]) -> list[tuple[str, object]]:
    """Return those names in the order of the source, a function with its parameters and their defaults."""
    lines = inspect.getsource(module).splitlines()
    found = []
    for line in lines:
        name = line.removeprefix("def ").split("(")[0].split(":")[0].split(" ")[0]
        if name in names:
            value = getattr(module, name)
            parameters = inspect.signature(value).parameters.values() if inspect.isfunction(value) else ()
            found.append((name, [(each.name, each.kind, each.default) for each in parameters]))
    return found


@pytest.mark.parametrize("pattern", OFFERED)
def test_all_tasks_offer_the_same(pattern: str) -> None:
    names = OFFERED[pattern]
    first, *others = (offered(module_of(task, pattern), names) for task in TASKS)
    assert [name for name, _ in first] == list(names)
    assert others == [first] * len(others)
