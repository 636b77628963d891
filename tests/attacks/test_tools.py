"""The tools that attack a service say ok of the answers that they want, and of no others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("grpc", reason="the gRPC extra is not installed")

from tools.attack import ON_ONE_SERVICE, Case, costly_json
from tools.service import longest_stall


class Answers(BaseHTTPRequestHandler):
    """The same status to everything, after the whole body."""

    status = 500

    def do_GET(self) -> None:
        left = int(self.headers.get("content-length", 0))
        while left:
            left -= len(self.rfile.read(min(left, 1 << 20)))
        self.send_response(self.status)
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def stub(answer: type[Answers]) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), answer) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def broken() -> Iterator[str]:
    with stub(Answers) as url:
        yield url


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    with socket.socket() as taken:  # Nobody listens, and nobody else gets it.
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.thorough
@pytest.mark.parametrize("url", ["broken", "closed"])
@pytest.mark.parametrize("case", ON_ONE_SERVICE, ids=lambda case: case.name)
def test_no_case_is_ok_where_nothing_works(case: Case, url: str, request: pytest.FixtureRequest) -> None:
    assert case.seen(request.getfixturevalue(url)).is_wanted is False


@pytest.mark.parametrize("url", ["broken", "closed"])
def test_a_service_that_does_not_answer_stalls_for_ever(url: str, request: pytest.FixtureRequest) -> None:
    with longest_stall(request.getfixturevalue(url)) as longest:
        pass
    assert longest == [float("inf")]


def test_all_answers_have_to_be_as_wanted() -> None:
    class Refuses(Answers):
        def do_POST(self) -> None:
            self.status = 400
            self.do_GET()

        def do_GET(self) -> None:
            self.status = 200 if self.command == "GET" else 400
            super().do_GET()

    with stub(Refuses) as url:
        assert costly_json(url, b"{}", wanted=400).is_wanted
        assert not costly_json(url, b"{}", wanted=413).is_wanted
