"""SIGTERM under load: requests without an answer, of clients that come back until a connection is refused."""

from __future__ import annotations

import collections
import signal
import sys
import threading
from typing import NamedTuple

import httpx

from tests.attacks.started import EXAMPLE
from tests.conftest import SHIPPED_BUNDLE
from tests.served import serve

CLIENTS = 16


class Drained(NamedTuple):
    """What one SIGTERM did.

    Attributes:
        answered: Requests, before and after the signal.
        lost: Requests that were sent and got no answer, by error.
        wrong: Answers that are not 200.
    """

    answered: int
    lost: dict[str, int]
    wrong: int


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
        threads = [threading.Thread(target=send) for _ in range(CLIENTS)]
        for thread in threads:
            thread.start()
        server.until(lambda: len(statuses) > 10 * CLIENTS)
        server.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
    wrong = sum(status != 200 for status in statuses)
    return Drained(len(statuses), dict(collections.Counter(lost)), wrong)


def main(runs: int = 50) -> int:
    """Print a line a run; 1 when a request was lost."""
    seen = []
    for _ in range(runs):
        seen.append(drain())
        print("answered {}, lost {}, wrong {}".format(*seen[-1]), flush=True)
    print(f"{sum(bool(each.lost) for each in seen)} of {runs} runs lost requests", flush=True)
    return 1 if any(each.lost or each.wrong for each in seen) else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
