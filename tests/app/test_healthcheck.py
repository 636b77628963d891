"""The health check, run as Docker runs it."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

import app.healthcheck
from app.cli import _listen
from app.healthcheck import DEFAULT_HOST, DEFAULT_PORT, is_ready, leave_address
from app.settings import Settings, load_settings
from psc_core.errors import UsageError
from tests.conftest import ROOT
from tests.served import GUARD_SECONDS, serve_fake


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that services of this machine have left do not count in this process."""
    monkeypatch.setattr(app.healthcheck, "_files", lambda: [tmp_path / "address"])


def healthcheck(**variables: str) -> int:
    command = [sys.executable, "-m", "app.healthcheck"]
    done = subprocess.run(command, env={**os.environ, **variables}, timeout=GUARD_SECONDS, check=False)
    return done.returncode


def test_follows_readiness() -> None:
    with serve_fake() as server:
        assert healthcheck(PSC_PORT=str(server.port)) == 0
        assert server.terminate() == 0
    assert healthcheck(PSC_PORT=str(server.port)) == 1


@pytest.mark.parametrize(("by", "host"), [("flags", "0.0.0.0"), ("flags", "::1"), ("file", "127.0.0.1")])
def test_finds_the_service_whatever_told_it_its_address(host: str, by: str, tmp_path: Path) -> None:
    (tmp_path / "settings.toml").write_text(f'host = "{host}"\nport = 0\n')
    environment = {"TMPDIR": str(tmp_path), "PSC_CONFIG": str(tmp_path / "settings.toml")}
    if by == "flags":
        environment |= {"PSC_HOST": "192.0.2.1", "PSC_PORT": "9"}
    flags = [f"--host={host}"] if by == "flags" else []
    try:
        _listen(host, 0).close()
    except UsageError:
        pytest.skip("this machine lacks the address")
    with serve_fake(*flags, environment=environment) as server:
        assert healthcheck(**environment) == 0
        assert healthcheck(**environment | {"PSC_PORT": "8"}) == 1  # The environment of another service.
        assert server.terminate() == 0
    assert not [file for file in tmp_path.iterdir() if file.name.startswith("psc-address")]


def test_without_a_writable_folder_the_environment_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app.healthcheck, "_files", lambda: [tmp_path / "none" / "file"])
    with leave_address("http://127.0.0.1:1") as is_left:
        assert not is_left


def test_the_address_of_another_user_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with leave_address("https://[::1]:1") as is_left:
        assert is_left and app.healthcheck._left_address() == "https://[::1]:1"
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert app.healthcheck._left_address() is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", ["", "{}", "[]", '"x"', "\x00", '{"address": '])
def test_a_damaged_address_does_not_count(content: str, tmp_path: Path) -> None:
    (tmp_path / "address").write_text(content)
    assert app.healthcheck._left_address() is None


def test_a_later_service_keeps_its_address(tmp_path: Path) -> None:
    with leave_address("http://later:2"):
        with leave_address("http://first:1"):
            (tmp_path / "address").write_text('{"address": "http://later:2"}')
        assert app.healthcheck._left_address() == "http://later:2"


def test_imports_the_standard_library_alone() -> None:
    code = (
        "import sys; sys.path.insert(0, '.'); import app.healthcheck; "
        "print(*{name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names)"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) <= {"app", "__main__"}


@pytest.mark.parametrize("value", ["tcp://10.0.0.1:8001", "", "8001"])
def test_asks_at_the_port_that_the_service_takes(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def refuse(_: object, url: str, **__: object) -> None:
        asked.append(url)
        raise ConnectionRefusedError

    monkeypatch.setenv("PSC_PORT", value)
    monkeypatch.delenv("PSC_HOST", raising=False)
    monkeypatch.delenv("PSC_TLS_CERTIFICATE", raising=False)
    monkeypatch.setattr("urllib.request.OpenerDirector.open", refuse)
    assert not is_ready()
    assert asked == [f"http://{load_settings().host}:{load_settings().port}/readyz"]


class Ready(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@contextmanager
def ready(listener: socket.socket | None = None) -> Iterator[int]:
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        if listener is not None:
            server.socket.close()
            server.socket = listener
        Thread(target=server.serve_forever).start()
        try:
            yield server.socket.getsockname()[1]
        finally:
            server.shutdown()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "::", "::1", "localhost"])
def test_asks_at_the_address_that_the_service_listens_on(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        listener = _listen(host or load_settings().host, 0)
    except UsageError:
        pytest.skip("this machine lacks the address")
    with ready(listener) as port:
        monkeypatch.setenv("PSC_HOST", host)
        monkeypatch.setenv("PSC_PORT", str(port))
        monkeypatch.delenv("PSC_TLS_CERTIFICATE", raising=False)
        assert is_ready()


def test_asks_no_proxy() -> None:
    with ready() as port:
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
        assert healthcheck(PSC_PORT=str(port), no_proxy="", NO_PROXY="", **proxies) == 0


def test_defaults_are_those_of_the_settings() -> None:
    fields = Settings.model_fields
    assert (fields["host"].default, str(fields["port"].default)) == (DEFAULT_HOST, DEFAULT_PORT)
