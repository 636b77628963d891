"""Classes by name: the names cost nothing, and each stands for the class that calls itself so."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping

import pytest

from psc_core.classes_by_name import ClassesByName
from psc_core.density import DENSITIES
from psc_core.fitted import Fitted
from psc_core.tasks import TASKS, module_of
from psc_core.tasks.task import task_type

FAMILIES: dict[str, Mapping[str, type[Fitted]]] = {
    "densities": DENSITIES,
    **{f"heads of {task}": task_type(task).heads for task in TASKS},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_class_calls_itself_as_it_is_listed(family: str) -> None:
    classes = FAMILIES[family]
    assert len(classes) == len({*classes.values()}) > 1
    assert [found.kind for found in classes.values()] == list(classes)


@pytest.mark.parametrize("task", TASKS)
def test_the_folder_of_a_task_says_its_noun(task: str) -> None:
    assert task_type(task).noun == module_of(task, "psc_core.tasks.{}").NOUN


def test_names_are_listed_without_importing_any_class() -> None:
    program = (
        "import sys; from psc_core.density import DENSITIES; from psc_core.tasks import TASKS, module_of; "
        "names = [*DENSITIES, *(head for task in TASKS for head in module_of(task, 'psc_core.tasks.{}.heads').HEADS)]; "
        "print(len(names), 'gda' in DENSITIES, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sum(map(len, FAMILIES.values()))), "True", "False"]


def test_an_unknown_name_is_a_key_error() -> None:
    classes: ClassesByName[int] = ClassesByName({"one": "builtins:int"})
    assert classes["one"] is int and "two" not in classes
    with pytest.raises(KeyError):
        classes["two"]
