"""A version says the same everywhere, so that its commit can be tagged; what the hosting service reads is valid."""

import re
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

from psc_core import __version__
from tests.conftest import ROOT
from tests.deploy.tools import checked, program

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\] - (\d{4}-\d{2}-\d{2})$", re.MULTILINE)


def test_changelog_begins_with_what_is_unreleased_and_the_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *releases = re.findall(r"^## .+$", text, re.MULTILINE)
    assert first == "## [Unreleased]"
    assert all(map(HEADING.fullmatch, releases))
    assert HEADING.findall(text)[0][0] == __version__
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= kinds


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    version, day = HEADING.findall((ROOT / "CHANGELOG.md").read_text())[0]
    assert (citation["version"], citation["date-released"]) == (version, date.fromisoformat(day))
    assert citation["license"] == PROJECT["project"]["license"]
    paper = citation["preferred-citation"]
    assert paper["title"].startswith("Probabilistic Skip Connections")
    assert [author["family-names"] for author in paper["authors"]] == ["Jimenez", "Katzfuss"]


@pytest.mark.parametrize("package", ["app", "psc_core"])
def test_types_are_part_of_the_wheel(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"][package]


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
