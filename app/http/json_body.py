"""Parse the JSON of a request, unless it has so many values that parsing would take too long.

The cost of JSON lies in its values, not its bytes: a megabyte of ``[],`` takes 0.1 s and 30 MB to parse, a hundred
times as much as a megabyte of base64, and the interpreter's lock is held throughout.  So commas, colons and brackets
are counted first, piece by piece at a gigabyte per second: a document cannot have more values than these.  (Those
inside strings count too, but no string that the service reads has many.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from app.errors import MalformedRequest

MAX_VALUES: Final = 1 << 22
"""The maximum number of values in one document; parsing them takes 0.1 s."""

MAX_CONTAINERS: Final = 1 << 18
"""The maximum number of lists, objects and keys in one document; parsing them takes 0.1 s."""

_MOST: Final = {b"[{:": MAX_CONTAINERS, b"[{:,": MAX_VALUES}

_PIECE: Final = 1 << 18
"""The bytes counted at a time; between two pieces, other threads get the interpreter's lock."""


class Marks:
    """A count of some characters in a body that comes in pieces.

    Args:
        most: Maps a set of characters to the maximum number of all of them together.
    """

    def __init__(self, most: Mapping[bytes, int]) -> None:
        self._most = most
        self._found = Counter(dict.fromkeys(b"".join(most), 0))

    def exceeded_with(self, piece: bytes) -> bool:
        """Count the characters of another piece; return whether there are now too many."""
        self._found.update({mark: piece.count(mark) for mark in self._found})
        return any(sum(self._found[mark] for mark in together) > limit for together, limit in self._most.items())


def has_more(body: bytes, most: Mapping[bytes, int]) -> bool:
    """Return whether some characters occur more often than ``most`` allows; counting stops once that is known."""
    marks = Marks(most)
    return any(marks.exceeded_with(body[start : start + _PIECE]) for start in range(0, len(body), _PIECE))


def counted() -> Callable[[bytes], None]:
    """Return a function that checks each piece of a document as it arrives, so that a costly one is not kept.

    The function raises the errors of :func:`load_json`.  A document whose pieces have passed goes to :func:`parsed`.
    """
    marks = Marks(_MOST)

    def check(piece: bytes) -> None:
        if marks.exceeded_with(piece):
            raise _too_costly()

    return check


def _too_costly() -> MalformedRequest:
    return MalformedRequest(
        f"expected JSON of at most {MAX_VALUES} values and {MAX_CONTAINERS} lists, objects and keys, got "
        "more; send fewer images, image files instead of pixels, or binary data"
    )


def load_json(body: bytes) -> Any:
    """Return the document.

    Raises:
        MalformedRequest: If it is not JSON, or has too many values, lists, objects or keys.
    """
    if has_more(body, _MOST):
        raise _too_costly()
    return parsed(body)


def parsed(body: bytes) -> Any:
    """Return a document whose values were counted before; counting them again takes longer than parsing it.

    Raises:
        MalformedRequest: If it is not JSON.
    """
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error
