"""JSON of a request, refused where it would cost more than it can be worth.

What JSON costs is its values, not its bytes: a megabyte of ``[],`` takes 0.1 s and 30 MB, a hundred times as much as a
megabyte of base64, all of it with the interpreter's lock held.  Commas, colons and brackets are counted first, a
gigabyte a second, and no more values exist afterwards.  (Those inside texts count too; no text that the service reads
has many.)
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from app.errors import MalformedRequest

MAXIMUM_VALUES: Final = 1 << 22
"""Values in one document; parsing them takes 0.1 s."""

MAXIMUM_CONTAINERS: Final = 1 << 18
"""Lists, objects and keys in one document; parsing them takes 0.1 s."""


def load_json(body: bytes) -> Any:
    """The document.

    Raises:
        MalformedRequest: It is not JSON, or has too many values, lists, objects or keys.
    """
    containers = body.count(b"[") + body.count(b"{") + body.count(b":")
    if containers > MAXIMUM_CONTAINERS or containers + body.count(b",") > MAXIMUM_VALUES:
        raise MalformedRequest(
            f"expected JSON of at most {MAXIMUM_VALUES} values and {MAXIMUM_CONTAINERS} lists, objects and keys, got "
            "more; send fewer images, image files instead of pixels, or binary data"
        )
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error.msg} at byte {error.pos}") from error
