"""What Docker asks, as Docker asks it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.served import GUARD_SECONDS, serve_fake


def healthcheck(**variables: str) -> int:
    """The exit code of Docker's command."""
    command = [sys.executable, "-m", "app.healthcheck"]
    done = subprocess.run(command, env={**os.environ, **variables}, timeout=GUARD_SECONDS, check=False)
    return done.returncode


def test_follows_readiness() -> None:
    with serve_fake() as server:
        assert healthcheck(PSC_PORT=str(server.port)) == 0
        assert server.terminate() == 0
    assert healthcheck(PSC_PORT=str(server.port)) == 1
