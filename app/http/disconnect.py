"""Find the clients that have left, without a task for each request.

While the client is connected, an ASGI server's ``receive()`` waits; after a disconnect it returns.  So ``receive()`` is
driven one step by hand: either it returns at once (the client has left), or it suspends (the client is there) and is
closed.  A sweep over all waiting requests a few times a second costs less than a task, and its wake-up, for each.
"""

from __future__ import annotations

from starlette.types import Receive


def has_disconnected(receive: Receive) -> bool:
    """Return whether the client has closed its connection; call it only after the whole body was read."""
    waiting = receive().__await__()
    try:
        next(waiting)
    except StopIteration as message:
        return bool(message.value["type"] == "http.disconnect")
    close = getattr(waiting, "close", None)  # Awaitables other than coroutines have none.
    if close is not None:
        close()
    return False
