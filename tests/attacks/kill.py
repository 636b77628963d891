"""SIGKILL of one of two workers under load: what is lost, how long nobody answers, when there are two again."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from itertools import pairwise
from typing import NamedTuple

import httpx

from tests.attacks.started import EXAMPLE
from tests.conftest import SHIPPED_BUNDLE
from tests.served import Server, serve

CLIENTS = 8


class Killed(NamedTuple):
    """What one SIGKILL did.

    Attributes:
        lost: Requests without an answer; each client has one at a time.
        wrong: Answers that are not 200 with the right label.
        meanwhile: Answers until there were two workers again.
        longest_gap_s: Between two answers of that time.
        two_again_s: Until the new worker was ready.
    """

    lost: int
    wrong: int
    meanwhile: int
    longest_gap_s: float
    two_again_s: float


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
