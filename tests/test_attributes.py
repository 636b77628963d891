"""The attributes of a class are described in one place: behind them, or in the docstring of the class."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WIDTH = 120


def flaws(source: str) -> Iterator[str]:
    """The classes whose attributes are described in another way than CONTRIBUTING.md says."""
    lines = source.splitlines()
    for each in ast.walk(ast.parse(source)):
        if not isinstance(each, ast.ClassDef):
            continue
        fields = {
            node.target.id: lines[node.end_lineno - 1]
            for node in each.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.end_lineno
        }
        described = _section(ast.get_docstring(each) or "")
        if any(isinstance(node, ast.AnnAssign) and _is_text(after) for node, after in pairwise(each.body)):
            yield f"{each.name}: text below an attribute"
        if described and any("  # " in line and "# type:" not in line for line in fields.values()):
            yield f"{each.name}: comments and a section"
        lengths = [len(f"{fields.get(name, '')}  # {text}") for name, text in described.items()]
        if described and described.keys() <= fields.keys() and _is_value(each) and max(lengths) <= WIDTH:
            yield f"{each.name}: a section that fits into comments"
        if described and (missing := {name for name in fields if not name.startswith("_")} - described.keys()):
            yield f"{each.name}: a section without {', '.join(sorted(missing))}"


def _section(docstring: str) -> dict[str, str]:
    text = re.search(r"^Attributes:\n((?: {4}.*\n?)+)", docstring, re.MULTILINE)
    return {} if text is None else dict(re.findall(r"^ {4}(\w+): ((?:.|\n {8})*)", text[1], re.MULTILINE))


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_value(node: ast.ClassDef) -> bool:
    return any("dataclass" in ast.unparse(each) or "NamedTuple" in ast.unparse(each)
               for each in (*node.decorator_list, *node.bases))  # fmt: skip


@pytest.mark.parametrize("package", ["psc_core", "app"])
def test_attributes_are_described_in_one_place(package: str) -> None:
    found = {path.name: list(flaws(path.read_text())) for path in (ROOT / package).rglob("*.py")}
    assert not {name: each for name, each in found.items() if each}


def test_each_flaw_is_found() -> None:
    text = 'class A:\n    x: int\n    """Its x."""\n'
    both = 'class B:\n    """B.\n\n    Attributes:\n        x: Its x.\n    """\n\n    x: int  # its x\n'
    short = '@dataclass\nclass C:\n    """C.\n\n    Attributes:\n        x: Its x.\n    """\n\n    x: int\n'
    long = short.replace("Its x.", f"Its {'x' * 120}.")
    lacks = both.replace("  # its x", "") + "    y: int\n"
    assert [list(flaws(each)) for each in (text, both, short, long, lacks)] == [
        ["A: text below an attribute"],
        ["B: comments and a section"],
        ["C: a section that fits into comments"],
        [],
        ["B: a section without y"],
    ]
