"""The health check, run as Docker runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from app.cli import _listen
from app.healthcheck import DEFAULT_HOST, DEFAULT_PORT, is_ready
from app.settings import Settings, load_settings
from psc_core.errors import UsageError
from tests.served import GUARD_SECONDS, serve_fake


def healthcheck(**variables: str) -> int:
    """Return the exit code of Docker's command."""
    command = [sys.executable, "-m", "app.healthcheck"]
    done = subprocess.run(command, env={**os.environ, **variables}, timeout=GUARD_SECONDS, check=False)
    return done.returncode


def test_follows_readiness() -> None:
    with serve_fake() as server:
        assert healthcheck(PSC_PORT=str(server.port)) == 0
        assert server.terminate() == 0
    assert healthcheck(PSC_PORT=str(server.port)) == 1


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
    """A service that is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()


@pytest.mark.parametrize("host", ["", "127.0.0.1", "0.0.0.0", "::", "::1", "localhost"])
def test_asks_at_the_address_that_the_service_listens_on(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        listener = _listen(host or load_settings().host, 0)
    except UsageError:
        pytest.skip("this machine lacks the address")
    port = listener.getsockname()[1]
    with HTTPServer(("", port), Ready, bind_and_activate=False) as server:
        server.socket.close()
        server.socket = listener
        Thread(target=server.serve_forever).start()
        try:
            monkeypatch.setenv("PSC_HOST", host)
            monkeypatch.setenv("PSC_PORT", str(port))
            monkeypatch.delenv("PSC_TLS_CERTIFICATE", raising=False)
            assert is_ready()
        finally:
            server.shutdown()


def test_asks_no_proxy() -> None:
    with HTTPServer(("127.0.0.1", 0), Ready) as server:
        Thread(target=server.serve_forever).start()
        try:
            proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy"), "http://127.0.0.1:9")
            assert healthcheck(PSC_PORT=str(server.server_port), no_proxy="", NO_PROXY="", **proxies) == 0
        finally:
            server.shutdown()


def test_defaults_are_those_of_the_settings() -> None:
    fields = Settings.model_fields
    assert (fields["host"].default, str(fields["port"].default)) == (DEFAULT_HOST, DEFAULT_PORT)
