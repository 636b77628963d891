"""API keys: who may predict, who may say what images show, and who may administer.

Keys are kept as SHA-256 digests and compared in constant time against every key, so neither the time taken nor a
memory dump of the comparison tells how close a guess was.  No key is ever written to a log or an error message.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from pydantic import SecretStr

from app.errors import Forbidden, Unauthorized
from app.settings import Settings
from psc_core.errors import UsageError


class ApiKeys:
    """The keys of all roles.  An admin key also predicts and gives feedback.

    Attributes:
        predict: Digests of the keys for prediction, the admin keys among them; empty when it is open to all.
        admin: Digests of the keys for administration; empty: administration is off.
        feedback: Digests of the keys for feedback, the admin keys among them; empty: feedback is off.

    Raises:
        UsageError: A key that no header can carry.
    """

    def __init__(self, predict: Iterable[str] = (), admin: Iterable[str] = (), feedback: Iterable[str] = ()) -> None:
        self.admin = frozenset(_digest(_checked(key)) for key in admin)
        self.feedback = self.admin | {_digest(_checked(key)) for key in feedback}
        self.predict = frozenset(_digest(_checked(key)) for key in predict)
        if self.predict:
            self.predict |= self.admin

    def __repr__(self) -> str:
        roles = ("predict", "admin", "feedback")
        return f"ApiKeys({', '.join(f'{role}={len(getattr(self, role))} keys' for role in roles)})"

    @classmethod
    def from_settings(cls, settings: Settings) -> ApiKeys:
        """Gather keys from values and files.

        Raises:
            UsageError: A file that cannot be read or holds no key, or a key that no header can carry.
        """
        return cls(
            (*_plain(settings.api_keys), *_from_file(settings.api_keys_file)),
            (*_plain(settings.admin_keys), *_from_file(settings.admin_keys_file)),
            (*_plain(settings.feedback_keys), *_from_file(settings.feedback_keys_file)),
        )

    def check_predict(self, headers: Mapping[str, str]) -> None:
        """Let holders of a key pass; everyone when there are no keys.

        Raises:
            Unauthorized: No key, or one that is not known.
        """
        if self.predict:
            _check(self.predict, headers)

    def check_feedback(self, headers: Mapping[str, str]) -> None:
        """Let holders of a key for feedback pass.

        Raises:
            Forbidden: No such key is configured.
            Unauthorized: No key, or not one for feedback.
        """
        _check_role("feedback", self.feedback, headers)

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Let holders of an admin key pass.

        Raises:
            Forbidden: No admin key is configured.
            Unauthorized: No key, or not an admin key.
        """
        _check_role("admin", self.admin, headers)


def _check_role(role: str, digests: Collection[bytes], headers: Mapping[str, str]) -> None:
    if not digests:
        raise Forbidden(f"no {role} keys are configured; set PSC_{role.upper()}_KEYS")
    _check(digests, headers)


def _check(digests: Collection[bytes], headers: Mapping[str, str]) -> None:
    key = headers.get("x-api-key")
    if key is None:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        key = token.strip() if scheme.lower() == "bearer" else ""
        if not key:
            raise Unauthorized("this needs an API key; send it as X-API-Key or Authorization: Bearer")
    given = _digest(key)
    if not sum(hmac.compare_digest(given, digest) for digest in digests):  # Every key is looked at.
        raise Unauthorized("the API key is not accepted here; ask the operator for one")


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
