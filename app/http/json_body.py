"""JSON of a request, refused where it would cost more than it can be worth.

What JSON costs is its values, not its bytes: a megabyte of ``[],`` takes 0.1 s and 30 MB, a hundred times as much as a
megabyte of base64, all of it with the interpreter's lock held.  Commas, colons and brackets are counted first, a
gigabyte a second and a piece at a time, and no more values exist afterwards.  (Those inside texts count too; no text
that the service reads has many.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from app.errors import MalformedRequest

MAX_VALUES: Final = 1 << 22
"""Values in one document; parsing them takes 0.1 s."""

MAX_CONTAINERS: Final = 1 << 18
"""Lists, objects and keys in one document; parsing them takes 0.1 s."""

_MOST: Final = {b"[{:": MAX_CONTAINERS, b"[{:,": MAX_VALUES}

_PIECE: Final = 1 << 18
"""Bytes that are counted before others have their turn."""


class Marks:
    """A count of some characters in the pieces of a body.

    Args:
        most: How often those of a key may, together.
    """

    def __init__(self, most: Mapping[bytes, int]) -> None:
        self._most = most
        self._found = Counter(dict.fromkeys(b"".join(most), 0))

    def are_more_with(self, piece: bytes) -> bool:
        """Count those of another piece; return whether there are more than allowed."""
        self._found.update({mark: piece.count(mark) for mark in self._found})
        return any(sum(self._found[mark] for mark in together) > limit for together, limit in self._most.items())


def has_more(body: bytes, most: Mapping[bytes, int]) -> bool:
    """Return whether some characters occur together more often than allowed; counting ends where that is known."""
    marks = Marks(most)
    return any(marks.are_more_with(body[start : start + _PIECE]) for start in range(0, len(body), _PIECE))


def counted() -> Callable[[bytes], None]:
    """Return a function to be given each piece of a document while it arrives: the rest of a refused one is not kept.

    It raises as :func:`load_json`; what passed is for :func:`parsed`.
    """
    marks = Marks(_MOST)

    def check(piece: bytes) -> None:
        if marks.are_more_with(piece):
            raise _too_costly()

    return check


def _too_costly() -> MalformedRequest:
    return MalformedRequest(
        f"expected JSON of at most {MAX_VALUES} values and {MAX_CONTAINERS} lists, objects and keys, got "
        "more; send fewer images, image files instead of pixels, or binary data"
    )


def load_json(body: bytes) -> Any:
    """The document.

    Raises:
        MalformedRequest: It is not JSON, or has too many values, lists, objects or keys.
    """
    if has_more(body, _MOST):
        raise _too_costly()
    return parsed(body)


def parsed(body: bytes) -> Any:
    """The document, whose values were counted already; counting takes longer than parsing it.

    Raises:
        MalformedRequest: It is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error
