"""What the hosting service reads: workflows, dependabot, issue forms."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import ROOT
from tests.deploy.tools import checked, program

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))
SCHEMAS = {
    "github-workflows": WORKFLOWS,
    "dependabot": [GITHUB / "dependabot.yml"],
    "github-issue-forms": FORMS,
    "citation-file-format": [ROOT / "CITATION.cff"],
}
MADE = ("lint", "types", "layers", "workflows", "docs", "test")
"""What CI makes."""


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def commands(job: dict[str, Any]) -> list[str]:
    return [step["run"] for step in job["steps"] if "run" in step]


def test_actionlint_finds_nothing() -> None:
    assert checked(program("actionlint", "make workflows"), *WORKFLOWS) == ""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_that_their_reader_expects(schema: str) -> None:
    validator = program("check-jsonschema", "pip install check-jsonschema")
    assert SCHEMAS[schema]
    checked(validator, "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema])


def test_ci_makes_every_check_on_every_python() -> None:
    job = jobs(GITHUB / "workflows" / "ci.yml")["check"]
    made = [run.removeprefix("make ") for run in commands(job) if run.startswith("make ")]
    assert made == list(MADE)
    assert set(made) <= set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    pythons = [each.split(" :: ")[-1] for each in classifiers if re.search(r":: 3\.\d+$", each)]
    assert job["strategy"]["matrix"]["python"] == pythons


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_may_read_and_end(workflow: Path) -> None:
    document = yaml.safe_load(workflow.read_text())
    assert document["permissions"] == {"contents": "read"} and "group" in document["concurrency"]
    for job in jobs(workflow).values():
        assert "permissions" not in job and job["timeout-minutes"] <= 60


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_to_a_commit_and_named_by_its_version(workflow: Path) -> None:
    used = re.findall(r"uses: (.+)", workflow.read_text())
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each) for each in used), used


def test_a_form_for_fits_says_what_may_be_attached() -> None:
    text = (GITHUB / "ISSUE_TEMPLATE" / "fit.yml").read_text()
    assert {form.stem for form in FORMS} == {"bug", "feature", "fit"}
    assert all(name in text for name in ("manifest.json", "collapse.csv", "report.html", "--dry-run", "pictures"))
