"""The listening socket, made before anything heavy is imported and handed to every process."""

from __future__ import annotations

import os
import socket
from typing import Final

BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""

INHERITED: Final = "_PSC_LISTENING_SOCKET"
"""Environment variable by which a worker learns the number of the inherited socket."""

SUPERVISOR: Final = "_PSC_SUPERVISOR"
"""Environment variable by which a worker learns the process id of its supervisor."""


def make_socket(host: str, port: int) -> socket.socket:
    """Listen on an address.

    Raises:
        OSError: The address cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    listener.set_inheritable(True)
    return listener


def inherited_socket() -> socket.socket | None:
    """The supervisor's listening socket, in a worker; ``None`` elsewhere."""
    number = os.environ.get(INHERITED)
    return None if number is None else socket.socket(fileno=int(number))


def supervisor_is_gone() -> bool:
    """Whether this is a worker that has lost its supervisor."""
    number = os.environ.get(SUPERVISOR)
    return number is not None and os.getppid() != int(number)
