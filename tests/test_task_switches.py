"""Nothing outside the modules of tasks asks which task a model has; the few places that do are named here."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Final, get_args

import pytest

from psc_core.tasks import TASKS
from psc_core.tasks.answer import scores_of
from psc_core.tasks.task import task_type
from tests.conftest import ROOT

LIMIT: Final = 2
"""Switches outside the tasks' own modules."""

SWITCHES: Final = Counter(
    {
        # Images have numbers or not, and so has a subset of them and a digest.
        "psc_core/data/dataset.py: self.values is None": 1,
        "psc_core/data/dataset.py: self.values is not None": 1,
    }
)
"""Where they are, how often, and why."""

MODEL_CLASSES: Final = ("psc_core.model.classifier", "psc_core.model.regressor")
"""Modules of the models of one task, beside those that bear its name."""

ATTRIBUTES: Final = frozenset({"target", "values", "is_regression", "has_numbers"})
"""What only the data, manifests or models of one task have, or have as something else than None."""

TABLES: Final = frozenset({"output_heads", "heads", "abstentions", "limits", "tensors", "query"})
"""Tables of a task: what one of them has in it, or that it is empty, tells which task it is."""

KINDS: Final = frozenset({"measure", "layer_quality", "task_type"})
"""What each task has one of; to compare it with one by name is to ask for the task."""

OWN_SCORES: Final = frozenset(
    name for name, count in Counter(each for task in TASKS for each in scores_of(task_type(task).answer_type)).items()
    if count == 1
)  # fmt: skip
"""Scores that only one task has."""


def is_of_one_task(path: Path) -> bool:
    """Whether a source belongs to one task, or to what tasks share: its folder or its own name says so."""
    relative = path.relative_to(ROOT).with_suffix("")
    words = {*relative.parts, *relative.stem.split("_")}
    return "tasks" in relative.parts or bool(words & {*TASKS}) or ".".join(relative.parts) in MODEL_CLASSES


def types_of_one_task(tree: ast.Module) -> set[str]:
    """Names that a module imports from the modules of one task, and the faces, from wherever they are imported."""
    found = {"PSC", "PSCRegressor"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and {*node.module.split(".")} & {*TASKS}:
            found |= {each.asname or each.name for each in node.names}
    return found


def is_switch(node: ast.AST, types: set[str]) -> bool:
    """Whether an expression asks for the task: for a type, a name, an attribute or a score that only one task has."""
    match node:
        case ast.Call(func=ast.Name("isinstance" | "issubclass"), args=[_, kinds]):
            return any(isinstance(each, ast.Name) and each.id in types for each in ast.walk(kinds))
        case ast.Call(func=ast.Name("getattr" | "hasattr"), args=[_, ast.Constant(name), *_]):
            return name in ATTRIBUTES
        case ast.Call(func=ast.Name("bool" | "len"), args=[value]):
            return is_attribute(value)
        case ast.Compare(ops=[ast.In() | ast.NotIn()], left=left, comparators=[ast.Attribute(attr=attr)]) if (
            attr in TABLES
        ):
            return not isinstance(left, ast.Name)  # A request may name any output.
        case ast.Compare(ops=[ast.Eq() | ast.NotEq() | ast.Is() | ast.IsNot()], left=left, comparators=[right]) if any(
            isinstance(side, ast.Attribute) and side.attr in KINDS for side in (left, right)
        ):
            return True
        case ast.Compare(left=left, comparators=comparators):
            sides = (left, *comparators)
            constants = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
            return bool(constants & {*TASKS, *OWN_SCORES}) or (None in constants and any(map(is_attribute, sides)))
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) | ast.UnaryOp(op=ast.Not(), operand=test):
            return is_attribute(test)
        case ast.BoolOp(values=values):
            return any(map(is_attribute, values))
        case ast.match_case(pattern=pattern):
            return any(isinstance(each, ast.Name) and each.id in types for each in ast.walk(pattern))
        case _:
            return False


def is_attribute(node: ast.AST) -> bool:
    """Whether an expression is one of :data:`ATTRIBUTES` or :data:`TABLES`, or a call of ``number``."""
    match node:
        case ast.Call(func=ast.Attribute(attr="number")):
            return True
        case ast.Attribute(attr=attr):
            return attr in ATTRIBUTES | TABLES
        case _:
            return False


def inside(node: ast.AST) -> Iterator[ast.AST]:
    """A node and everything below it, but what is asserted: that only tells a type checker what is known."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.Assert):
            yield from inside(child)


def switches_of(text: str) -> list[str]:
    """The switches in a source, as text."""
    tree = ast.parse(text)
    types = types_of_one_task(tree)
    found = [node for node in inside(tree) if is_switch(node, types)]
    return [ast.unparse(node.test if isinstance(node, ast.If | ast.IfExp | ast.While) else node) for node in found]


def test_switches_on_the_task_are_few_and_named() -> None:
    sources = [file for package in ("psc_core", "app") for file in (ROOT / package).rglob("*.py")]
    found = Counter(
        f"{file.relative_to(ROOT).as_posix()}: {switch}"
        for file in sources
        if not is_of_one_task(file)
        for switch in switches_of(file.read_text(encoding="utf-8"))
    )
    assert found == SWITCHES
    assert found.total() <= LIMIT


def test_the_page_tells_tasks_apart_in_one_file() -> None:
    types = [task_type(name) for name in TASKS]
    decisions = [get_args(task.answer_type.model_fields["decision"].annotation) for task in types]
    words = Counter(word for task in types for word in task.policy_type.model_fields) + Counter(chain(*decisions))
    own = {"model.target", *OWN_SCORES, *(word for word, count in words.items() if count == 1)}
    files = {file.name: file.read_text() for file in (ROOT / "app" / "http" / "page").glob("*.js")}
    found = {name: {word for word in own if re.search(rf"\b{word}\b", text)} for name, text in files.items()}
    assert {name for name, switches in found.items() if switches} == {"tasks.js"}


@pytest.mark.parametrize(
    "condition",
    [
        "isinstance(model, PSCRegressor)", "isinstance(task, (Regression, Other))", "data.target is None",
        "task.name == 'classification'", "kind in ('regression', 'other')", "hasattr(manifest, 'target')",
        "'mean' in outputs.scores", "not batch.values", "model.is_regression and asked", "task.number() is None",
        "bool(task.output_heads)", "'label' in task.tensors", "head.kind in task.output_heads", "report.measure == NC4",
        "task.has_numbers or asked",
    ],
)  # fmt: skip
def test_a_switch_is_seen(condition: str) -> None:
    imported = "from psc_core.tasks.regression.task import Regression"
    assert len(switches_of(f"{imported}\nif {condition}:\n    pass")) == 1
    assert len(switches_of(f"{imported}\nfound = {condition}")) == 1


@pytest.mark.parametrize(
    "condition",
    ["isinstance(error, PSCError)", "train.target != val.target", "x in seen.values()", "output not in task.tensors"],
)
def test_what_is_no_switch_is_not(condition: str) -> None:
    assert switches_of(f"if {condition}:\n    assert data.values is not None") == []
