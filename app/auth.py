"""API keys: who may predict, and, separately, who may administer.

Keys are kept as SHA-256 digests and compared in constant time against every key, so neither the time taken nor a
memory dump of the comparison tells how close a guess was.  No key is ever written to a log or an error message.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from pydantic import SecretStr

from app.errors import Forbidden, Unauthorized
from app.settings import Settings
from psc_core.errors import UsageError

_HOW: Final = "send it as X-API-Key or Authorization: Bearer"


class KeySet:
    """A set of accepted keys, held as digests only.

    Raises:
        UsageError: A key that no header can carry.
    """

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
        predict: Keys for prediction, the admin keys among them; empty when prediction is open to all.
        admin: Keys for administration; empty when nobody may administer.
    """

    def __init__(self, predict: Iterable[str] = (), admin: Iterable[str] = ()) -> None:
        admin, predict = tuple(admin), tuple(predict)
        self.predict = KeySet((*predict, *admin)) if predict else KeySet(())
        self.admin = KeySet(admin)

    def __repr__(self) -> str:
        return f"ApiKeys(predict={self.predict!r}, admin={self.admin!r})"

    @classmethod
    def from_settings(cls, settings: Settings) -> ApiKeys:
        """Gather keys from values and files.

        Raises:
            UsageError: A file that cannot be read or holds no key, or a key that no header can carry.
        """
        return cls(
            (*_plain(settings.api_keys), *_from_file(settings.api_keys_file)),
            (*_plain(settings.admin_keys), *_from_file(settings.admin_keys_file)),
        )

    def check_predict(self, headers: Mapping[str, str]) -> None:
        """Let holders of a key pass; everybody when there are no keys.

        Raises:
            Unauthorized: No key, or one that is not known.
        """
        if self.predict:
            _check(self.predict, headers)

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Let holders of an admin key pass.

        Raises:
            Forbidden: No admin key is configured, so nobody may.
            Unauthorized: No key, or not an admin key.
        """
        if not self.admin:
            raise Forbidden("no admin keys are configured; set PSC_ADMIN_KEYS")
        _check(self.admin, headers)


def _check(keys: KeySet, headers: Mapping[str, str]) -> None:
    key = _presented(headers)
    if key is None:
        raise Unauthorized(f"this needs an API key; {_HOW}")
    if not keys.accepts(key):
        raise Unauthorized("the API key is not accepted here; ask the operator for one")


def _presented(headers: Mapping[str, str]) -> str | None:
    """The key that a request carries, or ``None``."""
    key = headers.get("x-api-key")
    if key is not None:
        return key
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" and token.strip() else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _checked(key: str) -> str:
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise UsageError(
            "API keys must be printable ASCII without spaces; generate one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe(32))'"
        )
    return key


def _plain(keys: Iterable[SecretStr]) -> list[str]:
    return [key.get_secret_value() for key in keys]


def _from_file(path: Path | None) -> list[str]:
    """One key a line; blank lines and lines that begin with ``#`` are skipped."""
    if path is None:
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read the file of API keys {path} ({type(error).__name__}); check the path and its permissions"
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise UsageError(f"{path} holds no API key; write one key a line")
    return keys
