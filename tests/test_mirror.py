"""Tests lie where their sources lie; those of several modules lie in folders named ``across``."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import ROOT

UNTESTED = {
    # Declarations: tested where they are used.
    "app/errors", "app/response", "app/http/schemas", "app/http/v2/schemas", "app/inference/request",
    "psc_core/policy", "psc_core/prediction", "psc_core/value_prediction", "psc_core/version",
    # Tested through the modules that use them.
    "psc_core/model/base", "psc_core/model/load", "psc_core/model/value_predictions", "app/client/errors",
    "app/settings_sources", "psc_core/cli/score", "psc_core/scoring/outputs",
    # Tables of the documentation: tests/docs.
    "app/reference",
    # Tested with the head that they fit, in tests/psc_core/heads.
    "psc_core/heads/fit/blr", "psc_core/heads/fit/duq", "psc_core/heads/fit/dve", "psc_core/heads/fit/head",
    "psc_core/heads/fit/laplace", "psc_core/heads/fit/sngp", "psc_core/heads/fit/value",
}  # fmt: skip
"""Sources without a test file of their own."""

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
    assert sources - tests == UNTESTED
