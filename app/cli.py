"""``psc-serve``: serve bundles over HTTP.

Flags win over ``PSC_*`` environment variables, which win over the TOML file of ``--config``.  SIGTERM and Ctrl-C drain
the service, SIGHUP reloads the bundles.  The exit code is one of :class:`psc_core.errors.ExitCode`.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import logging.config
import os
import signal
import socket
import ssl
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final

from app.healthcheck import address_of, leave_address
from app.settings import BACKLOG, Settings, load_settings
from app.tracing import log_config
from psc_core import __version__
from psc_core.allocator import let_waiting_threads_sleep
from psc_core.errors import ExitCode, PSCError, UsageError, why_no_bundle
from psc_core.network import LIBRARIES

logger = logging.getLogger("psc.cli")

DEMO: Final = "dirty-mnist-resnet18"


# The flags that ``--help`` explains; ``--help-all`` explains all.
COMMON: Final = (
    "bundle", "host", "port", "device", "workers", "alpha", "ambiguity_threshold", "max_width", "api_keys_file", "log",
    "allow_factories", "config",
)  # fmt: skip


class _HelpAll(argparse.Action):
    def __call__(self, *_: Any) -> None:
        parser(all_flags=True).print_help()
        sys.exit(ExitCode.OK)


def parser(*, all_flags: bool = False) -> argparse.ArgumentParser:
    """Return the parser of the command line, with one flag for each setting."""
    flags = argparse.ArgumentParser(
        prog="psc-serve",
        usage="%(prog)s --bundle DIR [flag ...]",
        description="Serve PSC bundles over HTTP. Every flag is also PSC_NAME in the environment and a key "
        "of the TOML file; flags win over the environment, which wins over the file.",
        epilog="SIGTERM and Ctrl-C finish what was accepted; SIGHUP reloads the bundles. Exit codes: 0 done, "
        "2 bad usage or bad input, 1 a failure.",
        allow_abbrev=False,
    )
    flags.add_argument(
        "--help-all",
        action=_HelpAll,
        nargs=0,
        default=argparse.SUPPRESS,
        help="explain all flags, not only the common ones",
    )
    flags.add_argument("--version", action="version", version=f"psc {__version__}")
    flags.add_argument("--demo", action="store_true", help="serve the digits that PSC ships with")
    for name, field in sorted(Settings.model_fields.items(), key=lambda item: item[0] not in COMMON):
        default = default_text(name)
        text = (field.description or "").replace("%", "%%") + (f" (default: {default})" if default else "")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
        options["help"] = text if all_flags or name in COMMON else argparse.SUPPRESS
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif str(field.annotation).startswith("tuple"):
            options |= {"action": "append", "metavar": name.upper()}
        else:
            options["metavar"] = name.upper()
        flags.add_argument("--" + name.replace("_", "-"), **options)
    return flags


def default_text(name: str) -> str:
    """Return a setting's default as ``--help`` and the documentation show it; empty if it has none."""
    default = Settings.model_fields[name].default
    if default is None or default in ((), ""):
        return ""
    if isinstance(default, tuple):
        return ",".join(default)
    return str(default).lower() if isinstance(default, bool) else str(default)


def settings_from(arguments: Sequence[str]) -> Settings:
    """Read the settings from a command line."""
    flags = vars(parser().parse_args(arguments))
    lists = {name: ",".join(value) for name, value in flags.items() if isinstance(value, list)}
    if flags.pop("demo"):
        lists["bundle"] = ",".join(filter(None, [lists.get("bundle"), str(demo_bundle())]))
    return load_settings({**flags, **lists})


def demo_bundle() -> Path:
    """Return the folder of the shipped bundle, in a checkout or where an installed wheel put it."""
    places = (Path(__file__).parents[1] / "artifacts", Path(sys.prefix) / "share" / "psc")
    for place in places:
        if (place / DEMO / "manifest.json").is_file():
            return place / DEMO
    raise UsageError(f"there is no demonstration bundle in {' or '.join(map(str, places))}; pass --bundle DIR")


def run(arguments: Sequence[str]) -> int:
    """Serve until told to stop, and return the exit code."""
    began = time.monotonic()
    # By default SIGHUP ends a process, and an operator may send it before there is anything to reload.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, end)
    settings = settings_from(arguments)
    logging.config.dictConfig(log_config(settings.log_level, is_terminal=sys.stderr.isatty()))
    if not settings.bundle:
        raise UsageError("no bundle to serve; pass --bundle DIR, or --demo")
    for name, path in settings.named_bundles:
        if reason := why_no_bundle(path):
            raise UsageError(f"bundle {name}: {reason}")
    _check_tls(settings.tls_certificate, settings.tls_key)
    for name, path in settings.named_bundles:
        check_factory(name, path / "manifest.json", settings.allow_factories)
    listener = _listen(settings.host, settings.port)
    if settings.grpc_port is not None:
        # Only to fail early on a port that is taken: the application binds it again when it starts.
        _listen(settings.host, settings.grpc_port).close()
    address = address_of(settings.host, listener.getsockname()[1], tls=settings.tls_certificate is not None)
    logger.info("Loading %s, listening on %s", " and ".join(name for name, _ in settings.named_bundles), address)
    with leave_address(address) as is_left:
        if not is_left:
            logger.warning(
                "no folder for temporary files is writable, so the health check goes by PSC_HOST and PSC_PORT"
            )
        code = _serve(settings, listener, address, began)
    from app.main import end_threads

    end_threads(code)
    return code


def _serve(settings: Settings, listener: socket.socket, address: str, began: float) -> int:
    """Import what serves, serve until told to stop, and return the exit code."""
    let_waiting_threads_sleep()
    gc.disable()  # Each collection would walk all that was imported so far, and none of it is garbage.
    from app.server import serve  # Importing torch takes seconds: a mistake in the settings should show before.

    gc.freeze()
    gc.enable()

    try:
        code, message = serve(settings, listener, address, began)
        if message:
            logger.critical("%s", message)
    except SystemExit as stop:  # Startup has failed, or a signal came before it was complete.
        code = int(stop.code or 0)
    finally:
        gc.unfreeze()  # Or libraries would report at exit that their objects have leaked.
    return code


def end(*_: object) -> None:
    """End this process on its first signal; another one while it ends would interrupt its last steps."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    sys.exit(ExitCode.OK)


def unbuffer_stderr() -> None:
    """Write to standard error without a buffer, in this process and in those that it starts.

    A buffer keeps what a full disk refuses, and every later flush raises: at the start of a process and at exit too.
    """
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    raw = getattr(getattr(sys.stderr, "buffer", None), "raw", None)
    if raw is not None:
        sys.stderr = io.TextIOWrapper(raw, sys.stderr.encoding, sys.stderr.errors, write_through=True)


def main() -> None:
    """Run ``psc-serve``."""
    unbuffer_stderr()
    try:
        code = run(sys.argv[1:])
    except PSCError as error:
        print(f"psc-serve: {error}", file=sys.stderr, flush=True)
        code = ExitCode.BAD_INPUT
    except KeyboardInterrupt:
        code = ExitCode.OK
    sys.exit(code)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise UsageError(f"cannot listen on {host}:{port} ({error.strerror}); choose another port") from error


def check_factory(name: str, manifest: Path, allowed: Collection[str]) -> None:
    """Refuse a network whose code may not be imported, before anything is loaded.

    A broken manifest passes: whoever reads the whole bundle has the better error message.
    """
    try:
        spec = json.loads(manifest.read_bytes())["backbone"]["network"]["spec"]
        family = spec.partition(":")[0]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return
    if family not in LIBRARIES and spec not in allowed:
        raise UsageError(
            f"bundle {name}: its network comes from {spec}, whose code would run here; if you trust it, pass "
            f"--allow-factories {spec} or set PSC_ALLOW_FACTORIES"
        )


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    """Refuse a certificate and a key that cannot serve a connection, before anything is loaded."""
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise UsageError(
            f"expected a PEM certificate chain in {certificate} and its unencrypted key in {key}, got "
            f"{error.strerror or error}; check --tls-certificate and --tls-key"
        ) from error


if __name__ == "__main__":
    main()
