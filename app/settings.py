"""Declare every setting of the service in one frozen object.

Flags win over ``PSC_*`` environment variables, which win over a TOML file.  An unknown name is an error in all three.
"""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, get_args

from pydantic import (
    BeforeValidator,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from psc_core.answers import (
    CLASSIFICATION_DECISIONS,
    REGRESSION_DECISIONS,
    Alpha,
    AmbiguityThreshold,
    BasePolicy,
    Coverage,
    MaxWidth,
)
from psc_core.errors import UsageError, fault, hint
from psc_core.images.decode import DEFAULT_MAX_PIXELS, PILLOW_MAX_PIXELS
from psc_core.settings import Backend

BACKLOG: Final = 2048  # the number of connections that may wait to be accepted
# The decisions that ``log_images`` may name.
_DECISIONS: Final = ("abstained", *dict.fromkeys((*REGRESSION_DECISIONS, *CLASSIFICATION_DECISIONS)))
_MAX_FRONTS: Final = 8  # where ``workers`` is unset, as its description says
_CPU_LIMIT: Final = Path("/sys/fs/cgroup/cpu.max")  # inside of a container
_MAX_DECODERS: Final = 16  # where ``decode_threads`` is unset, as its description says
_LOG_FRACTION: Final = 0.2  # the fraction of ``drain_seconds`` that is kept for the prediction log
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
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


def _split_keys(value: object) -> object:
    """Turn a text into keys; refuse one with commas or blanks alone, as two empty variables give: no key opens."""
    keys = _split(value)
    if value and keys == ():
        raise ValueError("expected a key, got only commas or blanks; set the variables it comes from, or leave it out")
    return keys


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]
Keys = Annotated[tuple[SecretStr, ...], BeforeValidator(_split_keys)]


def is_service_link(value: object) -> bool:
    """Return whether a value of ``PSC_…PORT`` is an address that Kubernetes or Docker set: ``tcp://10.0.0.1:8000``."""
    return isinstance(value, str) and _SERVICE_LINK.match(value) is not None


_LISTED = "`psc-serve --help-all` lists them"
_RENAMED = " (docs/renamed.md has those of before 1.0.0)"


def check_environment(names: Collection[str]) -> None:
    """Refuse environment variables with the prefix that are not settings."""
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or NOT_SETTINGS.fullmatch(variable) or name in names:
            continue
        if not (name.endswith("port") and is_service_link(value)):
            known = [f"{ENV_PREFIX}{each.upper()}" for each in names]
            raise UsageError(
                f"unknown setting {variable} in the environment; {hint(variable, known, _LISTED)}{_RENAMED}"
            )


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


def _threshold(declared: Any) -> Any:
    """Return the field for a threshold of a policy, with the description that the policy's own field has."""
    (field,) = declared.__metadata__
    return Field(default=None, description=f"{field.description.removesuffix('.')}; unset: the bundle's own.")


def _cpus() -> int:
    """Return the number of CPUs that this process may use, in its container if there is one."""
    cpus = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):  # No control group (version 2), or no limit.
        quota, period = map(int, _CPU_LIMIT.read_text().split())
        cpus = min(cpus, max(1, quota // period))
    return cpus


class Settings(BaseSettings):
    """The settings of one service process, each with the description that ``--help`` and the documentation show."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        env_ignore_empty=True,
        enable_decoding=False,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )

    config: Path | None = None
    """TOML file of settings."""
    bundle: Texts = ()
    """Bundles to serve, `DIR` or `NAME=DIR`, separated by commas (the flag may be repeated). The first is the default
    model; the name defaults to the directory's."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on; 0 picks a free one."""
    grpc_port: int | None = Field(None, ge=1, le=65535)
    """Port on which the v2 protocol is also served over gRPC (extra `psc[grpc]`); unset: no gRPC."""
    workers: int | None = Field(None, ge=0, le=1024)
    """Number of processes that answer HTTP and decode images, before one more with the models; 0: one process does
    everything; unset: as many as CPUs up to 2, then one fewer, at most 8; none on one CPU."""
    device: str = Field("auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """Device of the networks: `auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: int | None = Field(None, ge=1, le=1024)
    """Number of CPU threads of the network, which two batches at once share; unset: torch's choice, or one thread if a
    full batch takes less than 2 ms."""
    backend: Literal["auto", Backend] = "auto"
    """Backend of the network on a CPU: `folded` (batch normalisation folded into convolutions), `plain`, `onnx` (ONNX
    Runtime, extra `psc[onnx]`); `auto` starts on the first, measures all and goes on with the fastest."""
    compile: bool = False
    """Run the network through `torch.compile`, which needs a C++ compiler."""
    allow_factories: Texts = ()
    """Network factories `package.module:factory` that a bundle may import, separated by commas; the working directory
    is searched for packages that are not installed."""

    max_batch_size: int = Field(64, ge=1, le=4096)
    """Maximum number of images in one device step."""
    warmup_seconds: float = Field(600.0, gt=0, le=86_400)
    """Longest time that a model may take to warm up, seconds; a slower one is refused."""
    max_delay_ms: float = Field(0.0, ge=0, le=60_000)
    """Longest time that a batch waits to fill, milliseconds; 0: it waits only for images that are being decoded, if
    that saves time."""
    max_queue_images: int = Field(2048, ge=1)
    """Maximum number of images admitted and not yet on the device; beyond it: 429."""
    deadline_seconds: float = Field(10.0, gt=0)
    """Time in which an admitted request must be answered, seconds; after it: 504."""
    drain_seconds: float = Field(30.0, ge=0)
    """Longest time between SIGTERM and the end of the process, seconds; the last fifth is for the prediction log, if
    there is one."""
    decode_threads: int | None = Field(None, ge=1, le=1024)
    """Number of threads that decode images; unset: one per CPU, at most 16. Each front has twice its share of them."""
    inline_decode_bytes: int = Field(16 * 1024, ge=0)
    """Largest request, bytes, that is decoded without a thread if its pixels are few too, because handing it over would
    take longer than decoding it."""

    max_body_bytes: int = Field(64 << 20, ge=1)
    """Largest request body, bytes."""
    grpc_message_bytes: int = Field(16 << 20, ge=1)
    """Largest gRPC message, bytes; unlike an HTTP body, it is held in memory before it can be checked."""
    max_buffered_bytes: int = Field(1 << 30, ge=1)
    """Memory that all requests may hold at once, bytes: twice their bodies, and images being decoded or waiting; beyond
    it: 429. At most a quarter of the container's or machine's memory."""
    max_images_per_request: int = Field(512, ge=1)
    """Maximum number of images in one request."""
    max_pixels: int = Field(DEFAULT_MAX_PIXELS, ge=1, le=PILLOW_MAX_PIXELS)
    """Largest width × height of an image."""
    max_pixels_per_request: int = Field(1 << 29, ge=1)
    """Maximum number of pixels in all images of one request, if threads decode them; beyond it: 413. The default is 512
    images of 1024²."""
    max_requests: int = Field(4096, ge=1)
    """Maximum number of requests being answered at once; beyond it: 429. Each front may read as many more bodies."""
    upload_seconds: float = Field(60.0, gt=0)
    """Time in which a body must arrive, seconds; after it: 408. A connection is closed if its request's head does not
    arrive within this time, or if its client reads nothing of an answer for as long."""
    keep_alive_seconds: int = Field(75, ge=1)
    """Time after which an idle connection is closed, seconds; must be longer than that of a proxy in front, or requests
    sent at that very moment are lost."""

    alpha: Alpha | None = _threshold(Alpha)
    ambiguity_threshold: AmbiguityThreshold | None = _threshold(AmbiguityThreshold)
    max_width: MaxWidth | None = _threshold(MaxWidth)
    coverage: Coverage | None = _threshold(Coverage)

    api_keys: Keys = ()
    """Keys that may predict, separated by commas; empty: anyone may predict."""
    api_keys_file: Path | None = None
    """File of keys that may predict, one per line."""
    admin_keys: Keys = ()
    """Keys that may reload bundles, separated by commas; empty: `/admin` is off."""
    admin_keys_file: Path | None = None
    """File of keys that may reload bundles, one per line."""
    feedback_keys: Keys = ()
    """Keys that may send `/feedback`, separated by commas; empty: only admin keys may."""
    feedback_keys_file: Path | None = None
    """File of keys that may send `/feedback`, one per line."""
    cors_origins: Texts = ()
    """Origins from which browsers may call the service, separated by commas; `*`: all."""
    allowed_hosts: Texts = ()
    """Accepted `Host` headers, separated by commas, such as `*.example.org`; empty: all."""
    root_path: str = ""
    """Path under which a proxy publishes the service."""
    tls_certificate: Path | None = None
    """PEM certificate chain; if set, the service speaks HTTPS only."""
    tls_key: Path | None = None
    """PEM private key of the certificate."""

    page: bool = True
    """Serve the page at `/`."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`. Lines are JSON; on a terminal they are
    plain, and `info` shows only the start."""
    access_log: bool = False
    """Log a line for each request. Its client is taken from `X-Forwarded-For` if a proxy on this machine, or on an
    address in `FORWARDED_ALLOW_IPS`, sets that header."""
    log: str | None = None
    """Folder or `s3://BUCKET/PREFIX` of the prediction log (extra `psc[log]`); unset: no log."""
    log_rows: float = Field(1.0, ge=0, le=1)
    """Fraction of all images that get a row in the log."""
    log_sample: float = Field(0.01, ge=0, le=1)
    """Fraction of all images, drawn at random, that get a row and are stored, for `psc-recalibrate`."""
    log_images: Texts = ("abstained",)
    """Images that get a row and are stored, by decision: `abstained` or a decision, optionally with `:FRACTION`,
    separated by commas, such as `abstain_ood,accept:0.01`; empty: only those of `log_sample`."""
    log_days: int | None = Field(None, ge=1, le=36_500)
    """Days after which rows and images of the log are removed; unset: never."""
    log_flush_seconds: float = Field(60.0, gt=0, le=86_400)
    """Longest time between an answer and its row, seconds; a crash loses no more."""
    log_buffer_bytes: int = Field(64 << 20, ge=1 << 16)
    """Memory for rows and images that are not yet written, bytes; beyond it they are dropped."""
    otel: bool = False
    """Export traces with OpenTelemetry (extra `psc[otel]`)."""
    drift_window: int = Field(1000, ge=1, le=1_000_000)
    """Number of images in the window of `psc_drift_window_ood_rate`."""
    drift_false_alarm: float = Field(0.01, gt=0, lt=1)
    """Bound on the probability that any of the `drift_monitors` ever raises a false alarm."""
    drift_monitors: int = Field(100, ge=1, le=1_000_000)
    """Number of monitors that share the bound: each start or reload of a process begins one per model."""

    @field_validator("port", "grpc_port", mode="before")
    @classmethod
    def _ignore_service_link(cls, value: object, field: ValidationInfo) -> object:
        """Ignore ``PSC_PORT=tcp://…``, which Kubernetes sets for a service named psc (psc-grpc: ``PSC_GRPC_PORT``)."""
        return cls.model_fields[str(field.field_name)].default if is_service_link(value) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_images_per_request > self.max_queue_images:
            raise ValueError(
                f"expected max_images_per_request ≤ max_queue_images, got {self.max_images_per_request} > "
                f"{self.max_queue_images}; the largest request could never be admitted"
            )
        if self.max_delay_ms >= 1000 * self.deadline_seconds:
            raise ValueError(
                f"expected max_delay_ms below deadline_seconds, got {self.max_delay_ms:g} ms and "
                f"{self.deadline_seconds:g} s; a batch that waits to fill would miss the deadline"
            )
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ValueError("expected tls_certificate and tls_key together; set both or neither")
        for name, probability in self.log_image_probabilities.items():
            if name not in _DECISIONS or not 0 <= probability <= 1:
                raise ValueError(
                    f"expected log_images to name some of {', '.join(_DECISIONS)}, each perhaps with :FRACTION from 0 "
                    f"to 1, got {','.join(self.log_images)!r}"
                )
        for host in self.allowed_hosts:
            if "*" in host.removeprefix("*.") and host != "*":
                raise ValueError(f"expected allowed_hosts like example.org or *.example.org, got {host!r}")
        if self.grpc_port is not None and self.grpc_port == self.port:
            raise ValueError(f"expected different ports for grpc_port and port, got {self.port} for both")
        names = [name for name, _ in self.named_bundles]
        for name in names:
            if _NAME.fullmatch(name) is None:
                raise ValueError(
                    f"expected a bundle name of letters, digits, '.', '_', '-', got {name!r}; use NAME=DIR"
                )
            if name == "service":
                raise ValueError(
                    "expected a bundle name other than 'service', which names the service itself; use NAME=DIR"
                )
        if self.compile and self.backend not in ("auto", "folded"):
            raise ValueError(f"expected backend auto or folded with compile, got {self.backend}; leave one out")
        if len(set(names)) < len(names):
            raise ValueError(f"expected different bundle names, got {', '.join(names)}; use NAME=DIR")
        return self

    @property
    def answer_seconds(self) -> float:
        """The part of ``drain_seconds`` in which accepted requests are answered; the log is written in the rest."""
        return self.drain_seconds if self.log is None else (1 - _LOG_FRACTION) * self.drain_seconds

    @cached_property
    def fronts(self) -> int:
        """The number of processes before the one with the models; 0 if that is the only one."""
        if self.workers is not None:
            return self.workers
        cpus = _cpus()
        return min(_MAX_FRONTS, cpus if cpus == 2 else cpus - 1)

    @cached_property
    def decoders(self) -> int:
        """The number of threads that decode images; a request is cut into at most as many chunks."""
        return self.decode_threads or min(_MAX_DECODERS, _cpus())

    @property
    def named_bundles(self) -> tuple[tuple[str, Path], ...]:
        """The bundles as pairs (name, directory), the default first."""
        pairs = [entry.split("=", 1) if "=" in entry else ["", entry] for entry in self.bundle]
        # The name of a link, not of where it points: a reload looks for the name again, after the link has moved.
        return tuple((name or Path(os.path.normpath(Path(path).absolute())).name, Path(path)) for name, path in pairs)

    @property
    def log_image_probabilities(self) -> dict[str, float]:
        """The fraction of images to store, by decision or ``abstained``; NaN if it is not a number."""
        pairs = [entry.partition(":") for entry in self.log_images]
        return {name: _number(text) if colon else 1.0 for name, colon, text in pairs}

    def thresholds(self, policy: type[BasePolicy]) -> dict[str, float]:
        """Return the thresholds of a policy that are set here, by name; the others are the bundle's."""
        own = {name: getattr(self, name, None) for name in policy.model_fields}
        return {name: value for name, value in own.items() if value is not None}

    def unread_thresholds(self, policies: Iterable[type[BasePolicy]]) -> list[str]:
        """Return the thresholds that are set here though none of these policies has them."""
        read = {name for policy in policies for name in policy.model_fields}
        own = ("alpha", "ambiguity_threshold", "max_width", "coverage")
        return [name for name in own if name not in read and getattr(self, name) is not None]

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Order the sources: flags win over the environment, which wins over the file that either names."""
        check_environment(cls.model_fields)
        flags = init_settings.init_kwargs if isinstance(init_settings, InitSettingsSource) else {}
        # Empty variables are ignored, but this one names no images; its default would store some.
        empty = {"log_images": ()} if os.environ.get(f"{ENV_PREFIX}LOG_IMAGES") == "" else {}
        return init_settings, env_settings, InitSettingsSource(settings_cls, read_config(flags.get("config")) | empty)


for _field in Settings.model_fields.values():  # A description that takes two lines here is one line elsewhere.
    _field.description = " ".join((_field.description or "").split())


def load_settings(flags: Mapping[str, Any] | None = None) -> Settings:
    """Read the settings from flags, environment and file."""
    try:
        return Settings(**(flags or {}))
    except ValidationError as error:
        raise UsageError("; ".join(_sentence(item) for item in error.errors())) from error


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _sentence(item: Any) -> str:
    where = str(item["loc"][0]) if item["loc"] else ""
    if item["type"] == "extra_forbidden":
        return f"unknown setting {where!r}; {hint(where, [*Settings.model_fields], _LISTED)}{_RENAMED}"
    shown = where and SecretStr not in get_args(Settings.model_fields[where].annotation)
    return fault(item, "setting") + (f", got {item['input']!r}" if shown else "")
