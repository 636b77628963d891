"""SIGKILL of a front or the engine under load, and SIGTERM: what is lost, what is refused, how long nobody answers."""

from __future__ import annotations

import collections
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
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
    refused: int  # Answers 503.
    wrong: int  # Other answers that are not 200 with the right label.
    longest_gap_s: float  # Between two predictions.
    again_s: float  # Until there was another process, and predictions again.


def kill(server: Server, name: str) -> Killed:
    """Kill the process of this name while all clients send."""
    answers: list[float] = []
    lost: list[str] = []
    refused: list[float] = []
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
                if answer.status_code == 503:
                    refused.append(time.perf_counter())
                    time.sleep(0.1)
                    continue
                answers.append(time.perf_counter())
                if answer.status_code != 200 or answer.json()["predictions"][0]["label"] != "7":
                    wrong.append(answer.status_code)

    with ThreadPoolExecutor(CLIENTS) as pool:
        sent = [pool.submit(send) for _ in range(CLIENTS)]
        try:
            server.until(lambda: len(answers) > 20 * CLIENTS)
            before, began = server.children[name], time.perf_counter()
            os.kill(before, signal.SIGKILL)
            server.until(lambda: server.children.get(name, before) != before)
            there = time.perf_counter()
            server.until(lambda: answers[-1] > there)
            again = answers[-1] - began
        finally:
            ended.set()
    for each in sent:
        each.result()
    gap = max(later - earlier for earlier, later in pairwise([began, *(each for each in answers if each > began)]))
    return Killed(len(lost), len(refused), len(wrong), gap, again)


class Drained(NamedTuple):
    """What one SIGTERM did."""

    answered: int  # Requests, before and after the signal.
    lost: dict[str, int]  # Requests that were sent and got no answer, by error.
    wrong: int  # Answers that are not 200.


def drain(*flags: str) -> Drained:
    """End a service that all clients send to, by default with its processes and backend; flags may say others.

    A client ends when its connection is refused.
    """
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

    with (
        serve(f"--bundle={SHIPPED_BUNDLE}", *flags, default=True) as server,
        ThreadPoolExecutor(DRAINED_CLIENTS) as pool,
    ):
        sent = [pool.submit(send) for _ in range(DRAINED_CLIENTS)]
        try:
            server.until(lambda: len(statuses) > 10 * DRAINED_CLIENTS)
        finally:
            server.process.send_signal(signal.SIGTERM)
        for each in sent:
            each.result()
    wrong = sum(status != 200 for status in statuses)
    return Drained(len(statuses), dict(collections.Counter(lost)), wrong)


def main() -> int:
    """Five times each, as a table; 1 when more was lost than each client's one request."""
    print("| killed | lost | 503 | wrong | longest without a prediction, s | as before after, s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    seen = []
    with serve(f"--bundle={SHIPPED_BUNDLE}", "--workers=2") as server:
        for name in ["psc-front-0"] * 5 + ["psc-engine"] * 5:
            seen.append(kill(server, name))
            print("| {} | {} | {} | {} | {:.2f} | {:.1f} |".format(name, *seen[-1]), flush=True)
    return 1 if any(each.lost > CLIENTS or each.wrong for each in seen) else 0


if __name__ == "__main__":
    sys.exit(main())
