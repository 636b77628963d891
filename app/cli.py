"""``psc-serve``: serve bundles over HTTP.

Flags, then ``PSC_*`` environment, then the TOML file of ``--config``.  SIGTERM drains, SIGHUP reloads.  Exit
codes: 0 done, 2 bad usage or bad input (one line, no traceback), 1 a failure.
"""

from __future__ import annotations

import argparse
import signal
import socket
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.dispatch import Channel, inherited_channel
from app.logs import configure_logs
from app.settings import Settings, default_text, load_settings
from app.sockets import make_socket
from app.supervisor import Supervisor, child_command
from psc_core.compute.allocator import keep_freed_memory
from psc_core.errors import PSCError, UsageError
from psc_core.version import __version__

EXIT_OK, EXIT_FAILURE, EXIT_BAD_INPUT = 0, 1, 2

_SWITCH_SECONDS = 5e-4
"""How long the event loop may keep the interpreter from the device thread, which wants it between two operations."""


def parser() -> argparse.ArgumentParser:
    """One flag for each setting."""
    flags = argparse.ArgumentParser(
        prog="psc-serve",
        description="Serve PSC bundles over HTTP. Every flag is also PSC_NAME in the environment and a key "
        "of the TOML file; flags win over the environment, which wins over the file.",
        epilog="SIGTERM finishes what was accepted; SIGHUP reloads the bundles. Exit codes: 0 done, "
        "2 bad usage or bad input, 1 a failure.",
        allow_abbrev=False,
    )
    flags.add_argument("--version", action="version", version=f"psc {__version__}")
    flags.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    for name, field in Settings.model_fields.items():
        default = default_text(name)
        text = (field.description or "").replace("%", "%%") + (f" (default: {default})" if default else "")
        options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS, "help": text}
        if field.annotation is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif str(field.annotation).startswith("tuple"):
            options |= {"action": "append", "metavar": name.upper()}
        else:
            options["metavar"] = name.upper()
        flags.add_argument("--" + name.replace("_", "-"), **options)
    return flags


def settings_from(arguments: Sequence[str]) -> Settings:
    """Settings of a command line.

    Raises:
        UsageError: Settings that cannot be used, or no bundle.
        SystemExit: Flags that argparse refuses (2), or ``--help`` (0).
    """
    flags = vars(parser().parse_args(arguments))
    config = flags.pop("config")
    lists = {name: ",".join(value) for name, value in flags.items() if isinstance(value, list)}
    return load_settings({**flags, **lists}, config=config)


def run(arguments: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until there is something to reload
    settings = settings_from(arguments)
    configure_logs(settings.log_level)
    if not settings.bundle:
        return _refuse("expected a bundle to serve, got none; pass --bundle DIR")
    for name, path in settings.named_bundles:
        if not (path / "manifest.json").is_file():
            return _refuse(f"bundle {name}: expected {path / 'manifest.json'}, got no such file; run psc-fit")
    _check_tls(settings.tls_certificate, settings.tls_key)
    channel = inherited_channel()
    if channel is not None:
        return _serve(settings, channel=channel)
    try:
        listener = make_socket(settings.host, settings.port)
    except OSError as error:
        return _refuse(f"expected to listen on {settings.host}:{settings.port}, {error.strerror}; free it")
    _say(settings, listener.getsockname()[1])
    if settings.workers == 1:
        return _serve(settings, listener=listener)
    return Supervisor(
        child_command(arguments), listener, workers=settings.workers, drain_seconds=settings.drain_seconds
    ).run()


def main() -> None:
    """Entry point of ``psc-serve``."""
    try:
        code = run(sys.argv[1:])
    except PSCError as error:
        code = _refuse(str(error))
    except KeyboardInterrupt:
        code = EXIT_OK
    sys.exit(code)


def network_threads(settings: Settings, usual: int) -> int:
    """Threads for the network of one of the workers, where PyTorch alone would take ``usual``."""
    return settings.threads or max(1, usual // settings.workers)


def _serve(settings: Settings, *, listener: socket.socket | None = None, channel: Channel | None = None) -> int:
    # Torch and the web framework load only in the process that serves, with input known to be good.
    import torch

    from app.main import create_app
    from app.server import Server

    if settings.allow_factories:
        sys.path.append(str(Path.cwd()))  # where they are looked up last
    keep_freed_memory()
    sys.setswitchinterval(_SWITCH_SECONDS)
    torch.set_num_threads(network_threads(settings, torch.get_num_threads()))
    server = Server(create_app(settings), settings, channel=channel)
    server.run([] if listener is None else [listener])
    if server.service.exit_code:
        _refuse(server.service.exit_message)
    return server.service.exit_code if server.started else EXIT_FAILURE


def _check_tls(certificate: Path | None, key: Path | None) -> None:
    """Refuse files that no connection could be served with, before anything is loaded."""
    if certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key, password="")
    except OSError as error:
        raise UsageError(
            f"expected a PEM certificate chain in {certificate} and its key, not encrypted, in {key}, got "
            f"{error.strerror or error}; check --tls-certificate and --tls-key"
        ) from error


def _say(settings: Settings, port: int) -> None:
    scheme = "http" if settings.tls_certificate is None else "https"
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    print(f"psc-serve: listening on {scheme}://{host}:{port}", file=sys.stderr, flush=True)


def _refuse(message: str) -> int:
    print(f"psc-serve: {message}", file=sys.stderr, flush=True)
    return EXIT_BAD_INPUT


if __name__ == "__main__":
    main()
