"""Connections until no file descriptor is left."""

from __future__ import annotations

import json
import os
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from app.metrics import SPARE, DescriptorWatch
from tests.conftest import SHIPPED_BUNDLE
from tests.served import GUARD_SECONDS, serve

LIMIT = 64


def test_connections_without_end_leave_one_line() -> None:
    words = (f"--bundle=m={SHIPPED_BUNDLE}", "--max-batch-size=8")
    program = ("bash", "-c", f'ulimit -n {LIMIT}; exec "$0" -m tests.app.serve_fake "$@"', sys.executable)
    with serve(*words, program=program) as server, ExitStack() as clients:
        assert not server.count_in_log("file descriptors are in use")
        for _ in range(2 * LIMIT):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port), GUARD_SECONDS))
        server.wait_for_log("file descriptors are in use")
        clients.close()
        server.wait_ready()
        assert server.terminate() == 0
    lines = [json.loads(line) for line in server.log]
    (line,) = [line for line in lines if "file descriptors" in line["message"]]
    assert line["level"] == "error"
    assert f"of {LIMIT} file descriptors" in line["message"]


@pytest.fixture
def descriptors() -> Iterator[list[int]]:
    """Descriptors of this process that a test opened, under a limit with a few free; none is free below the first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    opened = [os.open("/", os.O_RDONLY)]
    gaps = []
    while opened[-1] <= others:
        gaps.append(opened.pop())
        opened.append(os.open("/", os.O_RDONLY))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1 + 2 * SPARE, hard))
    yield opened
    for descriptor in (*opened, *gaps):
        os.close(descriptor)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("all_gone", [False, True])
def test_at_most_one_line_a_minute(descriptors: list[int], all_gone: bool, caplog: pytest.LogCaptureFixture) -> None:
    now = [100.0]
    watch = DescriptorWatch(clock=lambda: now[0])
    watch.check()
    assert not caplog.records
    while len(descriptors) <= (2 * SPARE if all_gone else SPARE):
        descriptors.append(os.open("/", os.O_RDONLY))
    for now[0], lines in ((101.0, 1), (160.9, 1), (161.1, 2), (170.0, 2)):
        watch.check()
        assert len(caplog.records) == lines
    os.close(descriptors.pop())
    for _ in range(SPARE if all_gone else 0):
        os.close(descriptors.pop())
    now[0] = 300.0
    watch.check()
    assert len(caplog.records) == 2
