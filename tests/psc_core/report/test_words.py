"""The words of a report: the glossary has every abbreviation that a reader meets."""

from __future__ import annotations

import re

import pytest

from psc_core.report import facts, words

KINDS = {
    "classifier": (words.TEXTS, words.GLOSSARY, facts.COLUMNS),
    "regression": (words.VALUE_TEXTS, words.VALUE_GLOSSARY, facts.VALUE_COLUMNS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_abbreviations_and_columns_are_in_the_glossary(kind: str) -> None:
    texts, glossary, columns = KINDS[kind]
    said = " ".join([*(text for pair in texts.values() for text in pair), *words.NO_LIMIT.values()])
    used = set(re.findall(r"\b(?:[A-Z]{2,}\d?|R²|ε)", f"{said} {' '.join(columns.values())}")) - {"PSC"}
    assert used and {name for name in used if not any(word.startswith(name) for word in glossary)} == set()


def test_a_figure_without_a_limit_has_a_text() -> None:
    assert set(words.NO_LIMIT) <= {*words.TEXTS, *words.VALUE_TEXTS}
