"""The product uses no private name of another library: one that changes without notice."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.conftest import ROOT

DOCUMENTED = {"_asdict", "_exit", "_replace"}
"""Public methods of a named tuple, which begin with ``_`` so that they are no fields, and a function of ``os``."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in DOCUMENTED


def bound(tree: ast.Module) -> Iterator[str]:
    """Names that the source itself gives to something."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                yield name


def borrowed(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names that the source takes from elsewhere, each with its line."""
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name, ctx=ast.Load()):
                yield node.lineno, name
            case ast.ImportFrom(module=module, names=names):
                yield from ((node.lineno, part) for part in (module or "").split("."))
                yield from ((node.lineno, alias.name) for alias in names)
            case ast.Import(names=names):
                yield from ((node.lineno, part) for alias in names for part in alias.name.split("."))


def test_private_names_are_our_own() -> None:
    files = [file for package in ("app", "psc_core") for file in (ROOT / package).rglob("*.py")]
    trees = {file.relative_to(ROOT): ast.parse(file.read_text()) for file in files}
    own = {name for tree in trees.values() for name in bound(tree)}
    found = [
        f"{file}:{line}: {name}"
        for file, tree in trees.items()
        for line, name in borrowed(tree)
        if is_private(name) and name not in own
    ]
    assert not found, f"private names of other libraries; use public ones: {', '.join(found)}"


def test_a_private_name_of_a_library_is_found() -> None:
    tree = ast.parse("from torch.fx.graph_module import _loader\nimport torch._C\nself._kept = net._forward_hooks\n")
    assert [name for _, name in borrowed(tree) if is_private(name)] == ["_loader", "_C", "_forward_hooks"]
    assert list(bound(tree)) == ["_kept"]
