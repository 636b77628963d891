"""The ranges of arguments, of command lines and Python alike, and values that command lines take as text."""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from typing import Any, Final

from psc_core.errors import UsageError

_WHOLE_NUMBER: Final = re.compile(r"0|[0-9]*[1-9][0-9]*")
"""What is read as an integer; Python itself would read "1_0" and " 5" too."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Range:
    """The numbers that an argument may be, those between two bounds that are not among them.

    Example:
        >>> 0.5 in FRACTION, 1.0 in FRACTION, POSITIVE.parse("3")
        (True, False, 3)
    """

    noun: str  # as messages name it
    kind: type[int] | type[float]
    above: int | float
    below: int | float = math.inf

    def __contains__(self, value: Any) -> bool:
        return bool(self.above < value < self.below)  # NaN is in none.

    def parse(self, text: str) -> Any:
        """Return the number in ``text`` (argparse type)."""
        return self._parsed(text, self.noun)

    def parse_or_auto(self, text: str) -> Any:
        """Return the number in ``text``, or None for ``"auto"`` (argparse type)."""
        return None if text == "auto" else self._parsed(text, f"{self.noun} or auto")

    def _parsed(self, text: str, wanted: str) -> Any:
        with suppress(ValueError):
            value = self.kind(text)
            if value in self and (self.kind is float or _WHOLE_NUMBER.fullmatch(text)):
                return value
        raise ArgumentTypeError(f"expected {wanted}, got {text!r}")


POSITIVE: Final = Range("a positive integer", int, 0)
WHOLE: Final = Range("0 or a positive integer", int, -1)
SEED: Final = Range("a whole number from 0 to 2**63 - 1", int, -1, 1 << 63)
POSITIVE_NUMBER: Final = Range("a number above 0", float, 0)
FRACTION: Final = Range("a number between 0 and 1", float, 0, 1)

positive, whole, positive_number = POSITIVE.parse, WHOLE.parse, POSITIVE_NUMBER.parse
open_unit_interval = FRACTION.parse


def by_commas(text: str) -> list[str]:
    """Split ``a,b`` into its parts; for flags with ``action="extend"``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``["a=1", "b=x"]`` into ``{"a": 1, "b": "x"}``; values that are not JSON stay text."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"expected key=value, got {pair!r}")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def day(text: str) -> str:
    """Return a day given as YYYY-MM-DD (argparse type)."""
    try:
        if date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ArgumentTypeError(f"expected a day as YYYY-MM-DD, got {text!r}")


def byte_count(text: str) -> int:
    """Parse ``"512M"``, ``"2G"`` or a plain number of bytes (argparse type)."""
    match = re.fullmatch(r"(\d+)([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) < 1:
        raise ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]
