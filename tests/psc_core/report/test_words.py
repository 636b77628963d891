"""The words of a report: the glossary has every abbreviation that a reader meets."""

from __future__ import annotations

import re

import pytest

from psc_core.tasks import TASKS, module_of


@pytest.mark.parametrize("task", TASKS)
def test_abbreviations_and_columns_are_in_the_glossary(task: str) -> None:
    words = module_of(task, "psc_core.report.{}.words")
    said = " ".join([*(text for pair in words.TEXTS.values() for text in pair), *words.NO_LIMIT.values()])
    used = set(re.findall(r"\b(?:[A-Z]{2,}\d?|R²|ε)", f"{said} {' '.join(words.COLUMNS.values())}")) - {"PSC"}
    assert used and {name for name in used if not any(word.startswith(name) for word in words.GLOSSARY)} == set()


@pytest.mark.parametrize("task", TASKS)
def test_a_figure_without_a_limit_has_a_text(task: str) -> None:
    words = module_of(task, "psc_core.report.{}.words")
    assert words.NO_LIMIT.keys() <= words.TEXTS.keys()
