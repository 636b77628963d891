"""Parse the values that command lines take as text: types for argparse, and ``key=value`` pairs."""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from datetime import date
from typing import Any, Final

from psc_core.errors import UsageError

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


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


def positive(text: str, wanted: str = "a positive integer") -> int:
    """Parse a positive integer (argparse type)."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return int(text)


def whole(text: str) -> int:
    """Parse zero or a positive integer (argparse type)."""
    return 0 if text == "0" else positive(text, "0 or a positive integer")


def positive_or_auto(text: str) -> int | None:
    """Parse a positive integer, or return None for ``"auto"`` (argparse type)."""
    return None if text == "auto" else positive(text, "a positive integer or auto")


def seed(text: str) -> int:
    """Parse a seed (argparse type)."""
    if not text.isdecimal() or int(text) >= 1 << 63:
        raise ArgumentTypeError(f"expected a whole number from 0 to 2**63 - 1, got {text!r}")
    return int(text)


def byte_count(text: str) -> int:
    """Parse ``"512M"``, ``"2G"`` or a plain number of bytes (argparse type)."""
    match = re.fullmatch(r"(\d+)([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) < 1:
        raise ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def positive_number(text: str) -> float:
    """Parse a finite number above 0 (argparse type)."""
    return _number(text, math.inf, "a number above 0")


def open_unit_interval(text: str) -> float:
    """Parse a number strictly between 0 and 1 (argparse type)."""
    return _number(text, 1.0, "a number between 0 and 1")


def _number(text: str, below: float, wanted: str) -> float:
    """Parse a number strictly between 0 and ``below``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < below:
        raise ArgumentTypeError(f"expected {wanted}, got {text!r}")
    return value
