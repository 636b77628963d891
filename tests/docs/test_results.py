"""Numbers of the results pages come from the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping

import pytest

from benchmarks.report import SECTIONS, section, updated
from benchmarks.runs import RESULTS
from tests.conftest import ROOT

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?!\w)")


@pytest.mark.parametrize("name", SECTIONS)
def test_section_is_made_from_its_results(name: str) -> None:
    text, page = section(RESULTS, name), (RESULTS / SECTIONS[name][0]).read_text()
    if text is None:  # Of a device that nothing was measured on.
        assert name.endswith("-cuda") and f"<!-- begin {name} -->" not in page
    else:
        assert updated(page, name, text) == page


def headlines() -> Mapping[str, str]:
    """Sections of the headline page that have a table, by title."""
    parts = re.split(r"\n## ", (RESULTS / "README.md").read_text())[1:]
    return {part.splitlines()[0]: part for part in parts if "\n|" in part}


@pytest.mark.parametrize("title", headlines())
def test_headline_numbers_are_on_the_page_they_link_to(title: str) -> None:
    """Each decimal number of a table is some number of the linked page, rounded."""
    part = headlines()[title]
    pages = set(re.findall(r"\]\(([a-z]+\.md)", part))
    known = [float(text.replace(",", "")) for page in pages for text in NUMBER.findall((RESULTS / page).read_text())]
    assert known
    cells = "\n".join(line.partition("|")[2].partition("|")[2] for line in part.splitlines() if line.startswith("|"))
    for text in NUMBER.findall(cells):
        decimals = len(text.partition(".")[2])
        error = 0.500001 * 10**-decimals
        if decimals:
            assert any(abs(value - float(text.replace(",", ""))) <= error for value in known), text


def test_numbers_of_the_shipped_bundle_are_measured() -> None:
    """Each decimal number of the section is one of its two evaluations, rounded."""
    page = (ROOT / "artifacts" / "README.md").read_text()
    section = page.partition("### What it measures")[2].partition("\n## ")[0]
    files = re.findall(r"\]\(\.\./benchmarks/results/(shipped[a-z-]*\.json)\)", section)
    assert len(set(files)) == 2
    known = [abs(value) for file in files for value in numbers_in(json.loads((RESULTS / file).read_text()))]
    known += [100 * value for value in known] + [100 * (1 - value) for value in known]
    tables = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    for text in NUMBER.findall(tables):
        decimals = len(text.partition(".")[2])
        if decimals:
            assert any(abs(value - float(text)) <= 0.500001 * 10**-decimals for value in known), text


def numbers_in(document: object) -> Iterator[float]:
    """Every number of a JSON document."""
    if isinstance(document, bool):
        return
    if isinstance(document, (int, float)):
        yield float(document)
    for inside in document.values() if isinstance(document, dict) else document if isinstance(document, list) else ():
        yield from numbers_in(inside)
