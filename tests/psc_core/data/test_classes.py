"""The order of classes: by their names, where these are the network's."""

from __future__ import annotations

import unicodedata
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from psc_core import PRESETS, open_dataset
from psc_core.data.open import check_same, in_network_order, match
from psc_core.errors import DataError
from psc_core.names import composed
from tests.conftest import ROOT

NAMES = st.lists(
    st.text(st.characters(categories=["L", "N"], include_characters=" _-"), min_size=1, max_size=6),
    min_size=2,
    max_size=8,
    unique=True,
)


@given(names=NAMES, data=st.data())
def test_equal_names_take_the_order_of_the_network(names: list[str], data: st.DataObject) -> None:
    of_network = data.draw(st.permutations(names))
    matched = match(names, of_network, "images")
    assert matched[0] == tuple(of_network)
    assert bool(matched[1]) == (of_network != names)


@given(count=st.integers(2, 8), data=st.data())
def test_case_and_separators_make_no_difference(count: int, data: st.DataObject) -> None:
    plain = [f"class {letter} of many" for letter in "abcdefgh"[:count]]
    spelled = [
        data.draw(st.sampled_from([str.upper, str.title, str.lower]))(
            name.replace(" ", data.draw(st.sampled_from(" _-")))
        )
        for name in plain
    ]
    of_network = data.draw(st.permutations(plain))
    assert match(spelled, of_network, "images")[0] == tuple(spelled[plain.index(name)] for name in of_network)


def test_equal_names_are_not_confused_with_similar_ones() -> None:
    assert match(["A", "a", "b_c", "b c"], ["b c", "a", "A", "b_c"], "")[0] == ("b c", "a", "A", "b_c")
    with pytest.raises(DataError, match=r"got 3 \(unknown: A, c; missing: C, A-\); use images"):
        match(["A", "a", "c"], ["a", "C", "A-"], "images")


@given(names=NAMES, data=st.data())
def test_composed_and_decomposed_names_are_the_same(names: list[str], data: st.DataObject) -> None:
    assume(len({*map(composed, names)}) == len(names))
    images, of_network = (
        [unicodedata.normalize(data.draw(st.sampled_from(["NFC", "NFD"])), name) for name in names] for _ in range(2)
    )
    of_network = data.draw(st.permutations(of_network))
    found = match(images, of_network, "images")[0]
    assert [*map(composed, found)] == [*map(composed, of_network)]


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_labels_follow_names_of_either_form(form: Any) -> None:
    names = ["호랑이", "고양이", "café"]
    data = replace(
        open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"]),
        classes=tuple(unicodedata.normalize(form, name) for name in names),
        labels=torch.arange(800) % 3,
    )
    assert data.classes == tuple(names)
    turned = [unicodedata.normalize("NFD", name) for name in names[::-1]]
    ordered, _ = in_network_order(data, turned)
    assert ordered.classes == tuple(names[::-1]) and torch.equal(ordered.labels, 2 - data.labels)
    check_same(ordered, turned, "network's")


def test_other_names_keep_their_order() -> None:
    matched = match(["n01440764", "n01443537"], ["tench", "goldfish"], "images/train")
    assert matched[0] == ("n01440764", "n01443537")
    assert matched[1] == (
        "no class of images/train has a name of the network's (tench, goldfish); their order is taken to be that of "
        "its outputs"
    )


@pytest.mark.parametrize(
    ("of_images", "message"),
    [
        (["cat", "dog"], r"expected the network's 3 classes in images, got 2 \(missing: bird\)"),
        (["bird", "cat", "dog", "eel"], r"got 4 \(unknown: eel\)"),
        (["bird", "cat", "hound"], r"got 3 \(unknown: hound; missing: dog\)"),
        (["x", "y"], r"got 2 \(unknown: x, y; missing: bird, dog, cat\)"),
        ([f"c{i:02}" for i in range(20)], r"unknown: c00, .*, c09, …; missing"),
    ],
)
def test_odd_classes_are_named(of_images: list[str], message: str) -> None:
    with pytest.raises(DataError, match=message):
        match(of_images, ["bird", "dog", "cat"], "images")


@given(order=st.permutations([str(digit) for digit in range(10)]))
def test_labels_keep_their_names(order: list[str]) -> None:
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    ordered, _ = in_network_order(data, order)
    assert ordered.classes == tuple(order)
    assert [ordered.classes[label] for label in ordered.labels] == [data.classes[label] for label in data.labels]
    back = ordered.in_order(data.classes)
    assert torch.equal(back.labels, data.labels) and back.digest() == data.digest()


def test_nothing_to_order() -> None:
    data = open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=PRESETS["mnist"])
    assert in_network_order(data, None) == (data, "")
    assert data.in_order(data.classes) is data.in_order(["other"]) is data.in_order([*data.classes[1:], "x"]) is data
