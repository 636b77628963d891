"""The words of a report: the glossary has every abbreviation that a reader meets."""

from __future__ import annotations

import re

import pytest

from psc_core.tasks import TASKS


@pytest.mark.parametrize("task", TASKS)
def test_abbreviations_and_columns_are_in_the_glossary(task: str) -> None:
    words = TASKS[task].report()
    said = " ".join([*(text for pair in words.texts.values() for text in pair), *words.no_limit.values()])
    used = set(re.findall(r"\b(?:[A-Z]{2,}\d?|R²|ε)", f"{said} {' '.join(words.columns.values())}")) - {"PSC"}
    assert used and {name for name in used if not any(word.startswith(name) for word in words.glossary)} == set()


@pytest.mark.parametrize("task", TASKS)
def test_a_figure_without_a_limit_has_a_text(task: str) -> None:
    words = TASKS[task].report()
    assert words.no_limit.keys() <= words.texts.keys()
