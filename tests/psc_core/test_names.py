from __future__ import annotations

import unicodedata
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from psc_core.errors import UsageError
from psc_core.text import class_names, compose

TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8).filter(compose)
NAMES = st.lists(TEXT, min_size=1, max_size=6, unique_by=compose)
BLANKS = st.text("  \t\u00a0\u2009\ufeff\u200b", max_size=3)


@given(name=TEXT, form=st.sampled_from(["NFC", "NFD"]), before=BLANKS, after=BLANKS)
def test_forms_and_blanks_at_the_ends_make_no_difference(name: str, form: Any, before: str, after: str) -> None:
    once = compose(name)
    assert compose(before + unicodedata.normalize(form, name) + after) == once == compose(once)
    assert unicodedata.is_normalized("NFC", once) and once == once.strip()


@given(names=NAMES, data=st.data())
def test_a_mapping_is_ordered_by_the_labels(names: list[str], data: st.DataObject) -> None:
    assume(not any(name.isdigit() for name in names))
    pairs = data.draw(st.permutations([*enumerate(names)]))
    kind = data.draw(st.sampled_from([int, np.int64, str]))
    wanted = tuple(map(compose, names))
    assert class_names({kind(label): name for label, name in pairs}) == wanted
    assert class_names({name: kind(label) for label, name in pairs}) == wanted


@given(names=NAMES)
def test_a_sequence_keeps_its_order(names: list[str]) -> None:
    wanted = tuple(map(compose, names))
    assert class_names(names) == class_names(tuple(names)) == class_names(np.array(names, dtype=object)) == wanted
    assert all(type(name) is str for name in class_names(np.array(["a", "b"])))


@pytest.mark.parametrize(
    "classes",
    [
        "abc", b"abc", 3, None, [], {}, [0, 1], ["a", 1], ["a", None], [None], ["a", ""], ["a", " \u00a0"], ["a", "a"],
        ["caf\u00e9", "cafe\u0301"], ["a", "a "], ["a", "\ud800"], {"a", "b"}, {"a": 0}.keys(), iter(["a", "b"]),
        {0: "a", 2: "b"}, {1: "a", 2: "b"}, {"a": 0, "b": 0}, {"a": 0, "b": 1.5}, {"a": "b"}, {0: 1, 1: 0},
        {"a": True, "b": False}, {"0": "1", "1": "0"}, {-1: "a", 0: "b"}, [["a"], ["b"]], np.arange(3), {0: 5, 1: "b"},
        {"01": "a", "0": "b"}, np.array([["a", "b"]]),
    ],
    ids=count(),  # The text of a set or of an iterator is another in every process.
)  # fmt: skip
def test_what_are_no_names_is_refused(classes: Any) -> None:
    with pytest.raises(UsageError, match="classes"):
        class_names(classes)
