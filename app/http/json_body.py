"""JSON of a request, refused where it would cost more than it can be worth.

What JSON costs is its values, not its bytes: a megabyte of ``[],`` takes 0.1 s and 30 MB, a hundred times as much as a
megabyte of base64, all of it with the interpreter's lock held.  Commas, colons and brackets are counted first, a
gigabyte a second and a piece at a time, and no more values exist afterwards.  (Those inside texts count too; no text
that the service reads has many.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import orjson

from app.errors import MalformedRequest

MAXIMUM_VALUES: Final = 1 << 22
"""Values in one document; parsing them takes 0.1 s."""

MAXIMUM_CONTAINERS: Final = 1 << 18
"""Lists, objects and keys in one document; parsing them takes 0.1 s."""

_PIECE: Final = 1 << 18
"""Bytes that are counted before others have their turn."""


def has_more(body: bytes, most: Mapping[bytes, int]) -> bool:
    """Return whether some characters occur together more often than allowed; counting ends where that is known."""
    found, marks = Counter[int](), set(b"".join(most))
    for start in range(0, len(body), _PIECE):
        piece = body[start : start + _PIECE]
        found.update({mark: piece.count(mark) for mark in marks})
        if any(sum(found[mark] for mark in together) > limit for together, limit in most.items()):
            return True
    return False


def load_json(body: bytes) -> Any:
    """The document.

    Raises:
        MalformedRequest: It is not JSON, or has too many values, lists, objects or keys.
    """
    if has_more(body, {b"[{:": MAXIMUM_CONTAINERS, b"[{:,": MAXIMUM_VALUES}):
        raise MalformedRequest(
            f"expected JSON of at most {MAXIMUM_VALUES} values and {MAXIMUM_CONTAINERS} lists, objects and keys, got "
            "more; send fewer images, image files instead of pixels, or binary data"
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error
