"""API keys: who may predict, and, separately, who may administer.

Keys are kept as SHA-256 digests and compared in constant time against every key, so neither the time taken
nor a memory dump of the comparison tells how close a guess was.  No key is ever written to a log or an error
message.  What a role without keys means is the caller's to decide, and to say loudly at start.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request

from app.errors import Unauthorized
from psc_core.errors import UsageError


class KeySettings(Protocol):
    """The settings this module reads: key values, and files of keys."""

    @property
    def api_keys(self) -> Iterable[Any]: ...
    @property
    def api_keys_file(self) -> Path | None: ...
    @property
    def admin_keys(self) -> Iterable[Any]: ...
    @property
    def admin_keys_file(self) -> Path | None: ...


class KeySet:
    """A set of accepted keys, held as digests only."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = frozenset(_digest(_checked(key)) for key in keys)

    def __len__(self) -> int:
        return len(self._digests)

    def __repr__(self) -> str:
        return f"KeySet({len(self)} keys)"

    def accepts(self, key: str) -> bool:
        """Whether ``key`` is one of the set; looks at every member whatever the outcome."""
        given = _digest(key)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(given, digest)
        return found


class ApiKeys:
    """The keys of both roles.  An admin key also predicts.

    Attributes:
        predict: Keys for prediction, the admin keys among them; empty when prediction is open.
        admin: Keys for administration.
    """

    def __init__(self, predict: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        admin = tuple(admin)
        predict = tuple(predict)
        self.predict = KeySet((*predict, *admin)) if predict else KeySet(())
        self.admin = KeySet(admin)

    def __repr__(self) -> str:
        return f"ApiKeys(predict={self.predict!r}, admin={self.admin!r})"

    @classmethod
    def from_settings(cls, settings: KeySettings) -> ApiKeys:
        """Gather keys from values and files.

        Raises:
            UsageError: A file that cannot be read or holds no key, or a key that no header can carry.
        """
        return cls(
            (*_plain(settings.api_keys), *_from_file(settings.api_keys_file)),
            (*_plain(settings.admin_keys), *_from_file(settings.admin_keys_file)),
        )


def require(keys: KeySet) -> Callable[[Request], Awaitable[None]]:
    """A check, usable as a FastAPI dependency, that lets only holders of one of ``keys`` pass.

    The key is read from ``X-API-Key`` or ``Authorization: Bearer``; without any keys everyone passes.  A
    refusal is :class:`Unauthorized` (401 with ``WWW-Authenticate``).
    """

    async def check(request: Request) -> None:
        if not keys:
            return
        key = _presented(request)
        if key is None:
            raise Unauthorized("expected an API key, got none; send it as X-API-Key or Authorization: Bearer")
        if not keys.accepts(key):
            raise Unauthorized("expected a valid API key, got one not accepted here; ask the operator")

    return check


def _presented(request: Request) -> str | None:
    """The key a request carries, or ``None``."""
    key = request.headers.get("x-api-key")
    if key is not None:
        return key
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _checked(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            "expected API keys of printable ASCII without spaces, got one that is empty or has other "
            "characters; generate one with: python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return key


def _plain(keys: Iterable[Any]) -> list[str]:
    """Key values as text; pydantic's ``SecretStr`` is opened."""
    return [key.get_secret_value() if hasattr(key, "get_secret_value") else key for key in keys]


def _from_file(path: Path | None) -> list[str]:
    """One key a line; blank lines and lines that begin with ``#`` are skipped."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"expected a readable file of API keys, got {type(error).__name__} for {path}; "
            "check the path and its permissions"
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"expected at least one API key in {path}, got none; write one key a line")
    return keys
