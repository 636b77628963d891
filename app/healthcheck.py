"""``python -m app.healthcheck``: exit with 0 if this container's service is ready, for Docker's ``HEALTHCHECK``.

A service leaves its address in a file once it listens (:func:`leave_address`), because only it knows its flags, its
TOML file and the port that the system picked.  The file's name depends on the ``PSC_*`` variables that give an address,
which the service and the check of one container share, so a check does not ask another service of the machine.  Without
a file, the check asks at the address in these variables.

It imports only the standard library, because it runs every few seconds.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import ssl
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.request import HTTPSHandler, ProxyHandler, build_opener

DEFAULT_HOST: Final = "127.0.0.1"
DEFAULT_PORT: Final = "8000"
TIMEOUT_SECONDS: Final = 2.0
_VARIABLES: Final = ("PSC_HOST", "PSC_PORT", "PSC_TLS_CERTIFICATE", "PSC_CONFIG")


def is_ready() -> bool:
    """Return whether ``/readyz`` answers 200."""
    context = ssl.create_default_context()
    # The certificate is of the service's public name, and this is the same container under another one.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # No proxy, which the environment may name for the service's own requests: it would answer for itself.
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=context))
    try:
        with opener.open(f"{_left_address() or _address_in_environment()}/readyz", timeout=TIMEOUT_SECONDS) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def address_of(host: str, port: int | str, *, tls: bool) -> str:
    """Return the URL of a service that listens at this host and port."""
    # Linux connects to 0.0.0.0 and ::, on which a service listens at all addresses, by the loopback interface.
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


@contextlib.contextmanager
def leave_address(address: str) -> Iterator[bool]:
    """Leave a service's address where the check finds it, and take it away at the end.

    Whether there was a place for it is yielded; a container may have a read-only file system.
    """
    content, left = json.dumps({"address": address, "pid": os.getpid()}), []
    for file in _files():
        with contextlib.suppress(OSError):
            part = file.with_name(f"{file.name}.{os.getpid()}")
            with open(part, "w", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW, 0o600)) as new:
                new.write(content)
            left.append(part.replace(file))
    try:
        yield bool(left)
    finally:
        for file in left:
            with contextlib.suppress(OSError):
                if file.read_text() == content:  # Or a later service has left its own.
                    file.unlink()


def _files() -> list[Path]:
    """Return the places of the file; ``/dev/shm`` is writable even in a container with a read-only file system."""
    key = hashlib.sha256(json.dumps([os.environ.get(name, "") for name in _VARIABLES]).encode()).hexdigest()[:16]
    folders = dict.fromkeys((os.environ.get("TMPDIR") or "/tmp", "/dev/shm"))
    return [Path(folder) / f"psc-address-{os.geteuid()}-{key}" for folder in folders]


def _left_address() -> str | None:
    for file in _files():
        try:
            with open(file, opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)) as left:
                status = os.fstat(left.fileno())
                # The folders belong to everyone, and another user's address is not this service's.
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    return str(json.loads(left.read(4096))["address"])
        except (OSError, ValueError, LookupError, TypeError):  # There is none, or it is damaged.
            continue
    return None


def _address_in_environment() -> str:
    port = os.environ.get("PSC_PORT", "")
    # Kubernetes sets PSC_PORT=tcp://… for a service named psc, and the service then takes its default.
    port = port if port.isdigit() else DEFAULT_PORT
    host = os.environ.get("PSC_HOST") or DEFAULT_HOST
    return address_of(host, port, tls=bool(os.environ.get("PSC_TLS_CERTIFICATE")))


if __name__ == "__main__":
    sys.exit(0 if is_ready() else 1)
