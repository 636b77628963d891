"""Find the clients that have left, without a task for each request.

An ASGI server reports a disconnect by letting ``receive()`` return; while the client is there it waits.  So each
``receive()`` is driven one step by hand: it returns at once (the client left) or suspends (it is there, and the
suspended call is closed).  A sweep over all waiting requests a few times a second costs less than a task, and a
wake-up, for each.
"""

from __future__ import annotations

from starlette.types import Receive


def has_disconnected(receive: Receive) -> bool:
    """Return whether the client of a request, whose body was read to the end, has closed its connection."""
    waiting = receive().__await__()
    try:
        next(waiting)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    close = getattr(waiting, "close", None)
    if close is not None:
        close()
    return False
