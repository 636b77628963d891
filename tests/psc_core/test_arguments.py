"""Text of command lines becomes values, or an error that says what was expected."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import Any

import pytest

from psc_core import settings
from psc_core.errors import UsageError

VALUES: dict[Callable[[str], Any], dict[str, Any]] = {
    settings.by_commas: {"a, b,,c": ["a", "b", "c"], "": []},
    settings.day: {"2026-02-28": "2026-02-28"},
    settings.positive: {"1": 1, "007": 7},
    settings.whole: {"0": 0, "3": 3},
    settings.POSITIVE.parse_or_auto: {"auto": None, "3": 3},
    settings.SEED.parse: {"0": 0, str(2**63 - 1): 2**63 - 1},
    settings.byte_count: {"5": 5, "512M": 512 << 20, "2gib": 2 << 30, "1kb": 1 << 10},
    settings.positive_number: {"1e3": 1000.0, "0.5": 0.5},
    settings.open_unit_interval: {"0.05": 0.05},
}
REFUSED = {
    settings.day: ("a day as YYYY-MM-DD", ["2026-02-30", "20260228", "today"]),
    settings.positive: ("a positive integer", ["0", "-1", "1.5", "many", ""]),
    settings.whole: ("0 or a positive integer", ["-1", "1.5", "x", "00", " 5", "1_0"]),
    settings.POSITIVE.parse_or_auto: ("a positive integer or auto", ["0", "none"]),
    settings.SEED.parse: ("a whole number from 0 to 2**63 - 1", ["-1", str(2**63), "x"]),
    settings.byte_count: ("a size such as 512M or 2G", ["0", "1.5G", "lots", "1T"]),
    settings.positive_number: ("a number above 0", ["0", "-1", "nan", "inf", "x"]),
    settings.open_unit_interval: ("a number between 0 and 1", ["0", "1", "-0.1", "nan", "x"]),
}


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, values in VALUES.items() for text in values])
def test_values(kind: Callable[[str], Any], text: str) -> None:
    assert kind(text) == VALUES[kind][text]


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, (_, texts) in REFUSED.items() for text in texts])
def test_an_error_says_what_was_expected(kind: Callable[[str], Any], text: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        kind(text)
    assert str(caught.value) == f"expected {REFUSED[kind][0]}, got {text!r}"


def test_key_values_are_json_where_they_parse() -> None:
    assert settings.key_values(["a=1", "b=x", "c=[true]", "d="]) == {"a": 1, "b": "x", "c": [True], "d": ""}
    for pair in ("novalue", "=1"):
        with pytest.raises(UsageError, match="expected key=value"):
            settings.key_values([pair])
