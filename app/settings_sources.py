"""Read settings from the ``PSC_*`` environment variables and a TOML file, and refuse unknown names in both."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Container
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, SecretStr

from psc_core.errors import UsageError

ENV_PREFIX: Final = "PSC_"
# Variables with the prefix that are not settings: the tests' data folder and axe-core, those of the client, which may
# share an environment with the service, and those that Kubernetes sets for a service ``psc…`` or Docker for a link.
# ``PSC_…PORT`` is no setting either if its value is the address of a service, see :func:`is_service_link`.
NOT_SETTINGS: Final = re.compile(
    r"PSC_(DATA|AXE|CLIENT_\w+|(\w+_)?(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?))"
)

_SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://")


def _split(value: object) -> object:
    """Turn the text ``"a, b"`` into ``("a", "b")``; return any other value unchanged."""
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]
Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_split)]


def is_service_link(value: object) -> bool:
    """Return whether a value of ``PSC_…PORT`` is an address that Kubernetes or Docker set: ``tcp://10.0.0.1:8000``."""
    return isinstance(value, str) and _SERVICE_LINK.match(value) is not None


def check_environment(names: Container[str]) -> None:
    """Refuse environment variables with the prefix that are not settings."""
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or NOT_SETTINGS.fullmatch(variable) or name in names:
            continue
        if not (name.endswith("port") and is_service_link(value)):
            raise UsageError(f"unknown setting {variable} in the environment; `psc-serve --help` lists them")


def read_config(flag: str | Path | None) -> dict[str, Any]:
    """Read the settings in the TOML file that the flag names, or else ``PSC_CONFIG``; none if neither does."""
    config = flag or os.environ.get(f"{ENV_PREFIX}CONFIG")
    if not config:
        return {}
    try:
        return tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the settings file {config}: {error.strerror}; check --config") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{config} is not TOML: {error}") from error
