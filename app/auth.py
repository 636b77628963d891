"""Check API keys: who may predict, give feedback or administer.

Keys are kept as SHA-256 digests, and a given key is compared with each of them in constant time, so neither the time
nor a memory dump tells how close a guess was.  No key is ever written to a log or an error message.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import SecretStr

from app.errors import Forbidden, Unauthorized
from app.settings import Settings
from psc_core.errors import UsageError


@dataclass(frozen=True, repr=False)
class ApiKeys:
    """The keys of all roles; an admin key may also predict and give feedback."""

    # The digests of the keys that may predict, admin keys included; empty if anyone may predict.
    predict: frozenset[bytes]
    admin: frozenset[bytes]  # the digests of the admin keys; empty if administration is off
    # The digests of the keys that may give feedback, admin keys included; empty if feedback is off.
    feedback: frozenset[bytes]

    def __repr__(self) -> str:
        roles = ("predict", "admin", "feedback")
        return f"ApiKeys({', '.join(f'{role}={len(getattr(self, role))} keys' for role in roles)})"

    @classmethod
    def of(cls, predict: Iterable[str] = (), admin: Iterable[str] = (), feedback: Iterable[str] = ()) -> ApiKeys:
        """Keep the digests of these keys."""
        admins, predicting = _digests(admin), _digests(predict)
        return cls(predicting | admins if predicting else predicting, admins, _digests(feedback) | admins)

    @classmethod
    def from_settings(cls, settings: Settings) -> ApiKeys:
        """Gather the keys from the settings and the files that they name."""
        return cls.of(
            (*_plain(settings.api_keys), *_from_file(settings.api_keys_file)),
            (*_plain(settings.admin_keys), *_from_file(settings.admin_keys_file)),
            (*_plain(settings.feedback_keys), *_from_file(settings.feedback_keys_file)),
        )

    def check_predict(self, headers: Mapping[str, str]) -> None:
        """Check that a request may predict; without configured keys every request may."""
        if self.predict:
            _check(self.predict, headers)

    def check_feedback(self, headers: Mapping[str, str]) -> None:
        """Check that a request may give feedback."""
        _check_role("feedback", self.feedback, headers)

    def check_admin(self, headers: Mapping[str, str]) -> None:
        """Check that a request has an admin key."""
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
    # A sum and not any(), which would stop at the match, and whose time would reveal which key it was.
    if not sum(hmac.compare_digest(given, digest) for digest in digests):
        raise Unauthorized("the API key is not accepted here; ask the operator for one")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digests(keys: Iterable[str]) -> frozenset[bytes]:
    return frozenset(_digest(_checked(key)) for key in keys)


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
    """Read one key per line, skipping blank lines and lines that begin with ``#``."""
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
        raise UsageError(f"{path} holds no API key; write one key per line")
    return keys
