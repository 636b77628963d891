"""SIGKILL of one of two workers under load, and SIGTERM of a service: what is lost, how long nobody answers."""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
import time
from itertools import pairwise
from typing import NamedTuple

import httpx

from tests.conftest import SHIPPED_BUNDLE
from tests.served import Server, serve
from tools.service import EXAMPLE

CLIENTS = 8
DRAINED_CLIENTS = 16


class Killed(NamedTuple):
    """What one SIGKILL did."""

    lost: int  # Requests without an answer; each client has one at a time.
    wrong: int  # Answers that are not 200 with the right label.
    meanwhile: int  # Answers until there were two workers again.
    longest_gap_s: float  # Between two answers of that time.
    two_again_s: float  # Until the new worker was ready.


def kill(server: Server) -> Killed:
    """Kill one worker while all clients send."""
    answers: list[float] = []
    lost: list[str] = []
    wrong: list[int] = []
    ended = threading.Event()

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=60, headers={"content-type": "image/png"}) as client:
            while not ended.is_set():
                try:
                    answer = client.post("/predict", content=EXAMPLE)
                except httpx.TransportError as error:
                    lost.append(repr(error))
                    continue
                answers.append(time.perf_counter())
                if answer.status_code != 200 or answer.json()["predictions"][0]["label"] != "7":
                    wrong.append(answer.status_code)

    threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    server.until(lambda: len(answers) > 20 * CLIENTS)
    ready = server.count_in_log('"model ready"')
    began = time.perf_counter()
    os.kill(min(server.workers), signal.SIGKILL)
    server.wait_for_log('"model ready"', ready + 1)
    two_again = time.perf_counter() - began
    ended.set()
    for thread in threads:
        thread.join()
    meanwhile = [began, *(each for each in answers if began < each < began + two_again)]
    gap = max(later - earlier for earlier, later in pairwise(meanwhile))
    return Killed(len(lost), len(wrong), len(meanwhile) - 1, gap, two_again)


class Drained(NamedTuple):
    """What one SIGTERM did."""

    answered: int  # Requests, before and after the signal.
    lost: dict[str, int]  # Requests that were sent and got no answer, by error.
    wrong: int  # Answers that are not 200.


def drain(*flags: str) -> Drained:
    """End a service that all clients send to; a client ends when its connection is refused."""
    statuses: list[int] = []
    lost: list[str] = []

    def send() -> None:
        with httpx.Client(base_url=server.url, timeout=60, headers={"content-type": "image/png"}) as client:
            while True:
                try:
                    statuses.append(client.post("/predict", content=EXAMPLE).status_code)
                except httpx.ConnectError:
                    return
                except httpx.TransportError as error:
                    lost.append(repr(error))

    with serve(f"--bundle={SHIPPED_BUNDLE}", *flags) as server:
        threads = [threading.Thread(target=send) for _ in range(DRAINED_CLIENTS)]
        for thread in threads:
            thread.start()
        server.until(lambda: len(statuses) > 10 * DRAINED_CLIENTS)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
    wrong = sum(status != 200 for status in statuses)
    return Drained(len(statuses), dict(collections.Counter(lost)), wrong)


def main() -> int:
    """Five times, as a table; 1 when more was lost than each client's one request."""
    print("| lost | wrong | answered meanwhile | longest without an answer, s | two workers again after, s |")
    print("| ---: | ---: | ---: | ---: | ---: |")
    seen = []
    with serve(f"--bundle={SHIPPED_BUNDLE}", "--workers=2") as server:
        for _ in range(5):
            seen.append(kill(server))
            print("| {} | {} | {} | {:.2f} | {:.1f} |".format(*seen[-1]), flush=True)
            server.until(lambda: len(server.workers) == 2)
    return 1 if any(each.lost > CLIENTS or each.wrong for each in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
