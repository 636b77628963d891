"""The load generator against a real server, and its summaries."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from benchmarks.serving.client import CONNECTION_LOST, Generator, Load, Response, Target, Timer, summary
from benchmarks.serving.load import back_to_normal, phase
from benchmarks.serving.processes import mean_batch, scraped
from tests.app.fakes import png
from tests.app.live import live_server


def target(port: int, *bodies: bytes) -> Target:
    return Target(port, "/predict", "image/png", bodies or (b"",))


def test_loops_get_a_response_to_every_request() -> None:
    async def send(port: int) -> tuple[Load, Load]:
        generator = Generator(target(port, png(5), png(200)))
        closed, opened = await generator.closed_loop(4, 0.5), await generator.open_loop(60, 0.5)
        assert "psc_" in await generator.get("/metrics")
        generator.close()
        return closed, opened

    with live_server() as url:
        closed, opened = asyncio.run(send(int(url.rsplit(":", 1)[1])))
    assert set(closed.statuses) == set(opened.statuses) == {"200"}
    assert 10 < len(opened.responses) < 60
    assert all(answer.seconds > 0 for answer in closed.responses)


def test_lost_connections_are_counted() -> None:
    assert set(asyncio.run(Generator(target(1)).open_loop(50, 0.1)).statuses) == {CONNECTION_LOST}


def test_summary_excludes_rejected_requests_from_latencies() -> None:
    answers = [Response(0.1 * k, 0.001 * (k + 1), 200, None) for k in range(10)]
    rejected = [Response(0.5, 9.0, 429, "2"), Response(0.6, 0.1, 429, None)]
    found = phase(Load(0.0, 2.0, [*answers, *rejected]))
    assert found["rejections_without_retry_after"] == 1
    assert (found["sent_per_s"], found["requests"], found["p50_ms"], found["p99_ms"]) == (6.0, 10, 6.0, 10.0)
    assert (found["seconds"], found["statuses"]) == (9.5, {"200": 10, "429": 2})  # The last answer came then.
    assert summary(Load(0.0, 1.0, answers), images=32)["images_per_s"] == 320


@pytest.mark.parametrize(("slow_until", "expected"), [(0.0, 0.0), (2.5, 3.0), (9.9, 10.0)])
def test_back_to_normal_after_the_last_slow_second(slow_until: float, expected: float) -> None:
    answers = [Response(0.05 * k, 1.0 if 0.05 * k <= slow_until else 0.01, 200, None) for k in range(1, 200)]
    assert back_to_normal(Load(0.0, 10.0, answers), 0.01) == expected


def test_scraped_metrics_leave_the_model_out() -> None:
    text = 'psc_batch_size_sum{model="a"} 3.0\npsc_batch_size_count{model="a"} 2.0\npsc_up{model="a",z="b"} 1.0\n'
    before = {"psc_batch_size_sum": 3.0, "psc_batch_size_count": 2.0, 'psc_up{z="b"}': 1.0}
    assert scraped(text) == before
    assert mean_batch(before, {"psc_batch_size_sum": 8.0, "psc_batch_size_count": 4.0}) == 2.5
    assert mean_batch(before, before) is None


def test_timer_is_never_early() -> None:
    async def sleep() -> list[float]:
        late = []
        with Timer() as timer:
            for seconds in (1e-9, 2e-4, 3e-3, 2e-4):
                began = time.perf_counter()
                await timer.sleep(seconds)
                late.append(time.perf_counter() - began - seconds)
        return late

    assert min(asyncio.run(sleep())) >= 0.0


def test_waiting_for_a_busy_generator_counts() -> None:
    """Requests that were due while nothing could be sent waited since then."""

    connections: list[Any] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def send() -> Load:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        generator = Generator(target(server.sockets[0].getsockname()[1]))
        asyncio.get_running_loop().call_later(0.1, time.sleep, 0.4)
        load = await generator.open_loop(200, 0.6)
        generator.close()
        server.close()
        await asyncio.gather(*connections)
        return load

    load = asyncio.run(send())
    assert set(load.statuses) == {"200"}
    assert sum(seconds > 0.1 for seconds in load.seconds()) > 30  # Of the 60 that were due in the first 0.3 s of them.
