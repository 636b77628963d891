"""The words of a report: the glossary has every abbreviation that a reader meets."""

from __future__ import annotations

import re

import pytest

from psc_core.report import facts, words

KINDS = {
    "classifier": (words.TEXTS, words.GLOSSARY, facts.COLUMNS),
}


@pytest.mark.parametrize("kind", KINDS)
def test_abbreviations_and_columns_are_in_the_glossary(kind: str) -> None:
    texts, glossary, columns = KINDS[kind]
    said = " ".join(text for pair in texts.values() for text in pair)
    used = set(re.findall(r"\b(?:[A-Z]{2,}\d?|R²|ε)", f"{said} {' '.join(columns.values())}")) - {"PSC"}
    assert used and {name for name in used if not any(word.startswith(name) for word in glossary)} == set()
