"""Numbers of the results pages come from the committed results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence

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


def check_known(cells: Iterable[str], known: Sequence[float]) -> None:
    """Each decimal number of a table is one of those that are known, rounded."""
    for text in NUMBER.findall("\n".join(cells)):
        decimals, number = len(text.partition(".")[2]), float(text.replace(",", ""))
        assert not decimals or any(abs(value - number) <= 0.500001 * 10**-decimals for value in known), text


@pytest.mark.parametrize("title", headlines())
def test_headline_numbers_are_on_the_page_they_link_to(title: str) -> None:
    pages = set(re.findall(r"\]\(([a-z]+\.md)", headlines()[title]))
    known = [float(text.replace(",", "")) for page in pages for text in NUMBER.findall((RESULTS / page).read_text())]
    assert known
    lines = (line for line in headlines()[title].splitlines() if line.startswith("|"))
    check_known([line.partition("|")[2].partition("|")[2] for line in lines], known)


def test_numbers_of_the_shipped_bundle_are_measured() -> None:
    """By one of its two evaluations."""
    page = (ROOT / "artifacts" / "README.md").read_text()
    section = page.partition("### What it measures")[2].partition("\n## ")[0]
    files = set(re.findall(r"\]\(\.\./benchmarks/results/(shipped[a-z-]*\.json)\)", section))
    assert len(files) == 2
    known: list[float] = []
    for file in files:
        json.loads((RESULTS / file).read_text(), parse_float=lambda text: known.append(abs(float(text))))
    known += [100 * value for value in known] + [100 * (1 - value) for value in known]
    check_known([line for line in section.splitlines() if line.startswith("|")], known)
