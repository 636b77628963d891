"""The listening socket, made before anything heavy is imported."""

from __future__ import annotations

import socket
from typing import Final

BACKLOG: Final = 2048
"""Connections that may wait to be accepted."""


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
    return listener
