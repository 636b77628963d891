"""A version says the same everywhere, so that its commit can be tagged."""

from __future__ import annotations

import re
import tomllib
from datetime import date

import pytest
import yaml

from psc_core import __version__
from tests.conftest import ROOT

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
