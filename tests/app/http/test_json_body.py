"""JSON costs no more than its limits allow, whatever it is made of."""

from __future__ import annotations

import orjson
import pytest

from app.errors import MalformedRequest, TooManyImages
from app.http.json_body import MAXIMUM_CONTAINERS, MAXIMUM_VALUES, load_json
from app.http.uploads import parse_json
from app.http.v2.tensors import parse_request


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (MAXIMUM_CONTAINERS + 1),
        b"[" + b"[]," * MAXIMUM_CONTAINERS + b"0]",
        b"[" + b"{}," * MAXIMUM_CONTAINERS + b"0]",
        b"[" + b"0," * MAXIMUM_VALUES + b"0]",
        b"{" + b'"k":0,' * MAXIMUM_CONTAINERS + b'"k":0}',
    ],
    ids=["deep", "lists", "objects", "numbers", "keys"],
)
def test_too_many_values_are_refused_before_they_exist(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    for parse in (load_json, lambda text: parse_request(text, None)):
        with pytest.raises(MalformedRequest, match="at most 4194304 values and 262144 lists, objects and keys"):
            parse(body)


def test_images_are_counted_before_they_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orjson, "loads", lambda _: pytest.fail("was parsed"))
    with pytest.raises(TooManyImages, match="expected at most 3 images, got more"):
        parse_json(b'{"images":[' + b'{"b64":""},' * 3 + b'{"b64":""}]}', 3)


def test_what_is_allowed_is_parsed() -> None:
    numbers = load_json(b"[" + b"0," * (MAXIMUM_VALUES - 2) + b"0]")
    assert len(numbers) == MAXIMUM_VALUES - 1
    assert load_json(b'{"a": [1, {"b": "c"}]}') == {"a": [1, {"b": "c"}]}
    with pytest.raises(MalformedRequest, match="not JSON: "):
        load_json(b"{")
