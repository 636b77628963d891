"""JSON costs no more than its limits allow, whatever it is made of."""

from __future__ import annotations

from typing import Any
from unittest import mock

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import MalformedRequest, TooManyImages
from app.http.body import MAX_CONTAINERS, MAX_VALUES, has_more, load_json, parse_json
from app.http.v2 import parse_request


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAX_CONTAINERS + 1),
        b"[" + b"[]," * MAX_CONTAINERS + b"0]",
        b"[" + b"{}," * MAX_CONTAINERS + b"0]",
        b"[" + b"0," * MAX_VALUES + b"0]",
        b"{" + b'"k":0,' * MAX_CONTAINERS + b'"k":0}',
    ],
    ids=["deep", "lists", "objects", "numbers", "keys"],
)
def test_too_many_values_are_refused_before_they_exist(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    for parse in (load_json, lambda text: parse_request(text, None)):
        with pytest.raises(MalformedRequest, match="at most 4194304 values and 262144 lists, objects and keys"):
            parse(body)


@given(st.text("[{:, ", max_size=40), st.integers(0, 12), st.integers(0, 20), st.integers(1, 9))
def test_counts_piece_by_piece_as_at_once(text: str, most: int, most_with_commas: int, piece: int) -> None:
    found = sum(text.count(mark) for mark in "[{:")
    too_many = found > most or found + text.count(",") > most_with_commas
    with mock.patch("app.http.body._PIECE", piece):
        assert has_more(text.encode(), {b"[{:": most, b"[{:,": most_with_commas}) == too_many


def test_counting_ends_where_it_is_known() -> None:
    class Counted(bytes):
        seen = 0

        def __getitem__(self, place: Any) -> Any:
            Counted.seen += 1
            return super().__getitem__(place)

    assert has_more(Counted(b"[]," * (4 * MAX_CONTAINERS)), {b"[{:": MAX_CONTAINERS})
    assert Counted.seen <= 4


def test_images_are_counted_before_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    with pytest.raises(TooManyImages, match="expected at most 3 images, got more"):
        parse_json(b'{"images":[' + b'{"b64":""},' * 3 + b'{"b64":""}]}', 3)


def test_what_is_allowed_is_parsed() -> None:
    numbers = load_json(b"[" + b"0," * (MAX_VALUES - 2) + b"0]")
    assert len(numbers) == MAX_VALUES - 1
    assert load_json(b'{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}
    with pytest.raises(MalformedRequest, match="not JSON: "):
        load_json(b"{")
