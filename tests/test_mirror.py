"""Tests lie where their sources lie; those of several modules lie in folders named ``across``."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from tests.conftest import ROOT

UNTESTED = {
    # Declarations: tested where they are used.
    "app/errors", "app/http/schemas", "app/http/v2/schemas", "app/inference/request", "psc_core/version",
    "psc_core/tasks/answer", "psc_core/tasks/policy", "psc_core/tasks/*/answer", "psc_core/tasks/*/policy",
    "psc_core/report/*/words", "psc_core/report/replay", "psc_core/collapse/quality", "psc_core/network/described/base",
    # Tested through the modules that use them.
    "app/client/errors", "app/log/feedback", "app/settings_sources", "psc_core/cli/run",
    "psc_core/cli/score", "psc_core/log/schema", "psc_core/model/load", "psc_core/network/onnx/body",
    "psc_core/network/onnx/restore", "psc_core/network/onnx/rewrite",
    "psc_core/network/onnx/cost", "psc_core/tasks/calibration", "psc_core/tasks/*/task",
    "psc_core/tasks/head", "psc_core/tasks/*/fit/data", "psc_core/tasks/*/fit/head",
    "psc_core/tasks/regression/fit/calibrate", "psc_core/tasks/regression/prediction",
    # Tables of the documentation: tests/docs.
    "app/reference",
}  # fmt: skip
"""Sources without a test file of their own; ``*`` stands for any task."""

PAGES = {"psc_core/bundle/format"}
"""Tests of a page of docs/ instead of a module."""


def _modules(folder: Path, prefix: str = "") -> set[str]:
    files = [file for package in ("app", "psc_core") for file in (folder / package).rglob(f"{prefix}*.py")]
    return {
        file.relative_to(folder).with_name(file.stem.removeprefix(prefix)).as_posix()
        for file in files
        if not file.stem.startswith("__") and file.parent.name != "across"
    }


def test_each_test_has_its_source_and_each_source_its_test() -> None:
    sources, tests = _modules(ROOT), _modules(ROOT / "tests", "test_")
    assert tests - sources == PAGES
    with_their_head = {name for name in sources if "/fit/" in name and name.replace("/fit/", "/heads/") in tests}
    untested = sources - tests - with_their_head
    assert {name for name in untested if not any(fnmatch(name, pattern) for pattern in UNTESTED)} == set()
    assert {pattern for pattern in UNTESTED if not any(fnmatch(name, pattern) for name in untested)} == set()
