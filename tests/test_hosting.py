"""What the hosting service reads: workflows, dependabot, issue forms."""

from __future__ import annotations

import re
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


def jobs(workflow: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(workflow.read_text())["jobs"]
    return found


def test_actionlint_finds_nothing() -> None:
    assert checked(program("actionlint", "make workflows"), *WORKFLOWS) == ""


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_that_their_reader_expects(schema: str) -> None:
    validator = program("check-jsonschema", "pip install check-jsonschema")
    assert SCHEMAS[schema]
    checked(validator, "--builtin-schema", f"vendor.{schema}", *SCHEMAS[schema])


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
