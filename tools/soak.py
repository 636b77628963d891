"""``make soak``: mixed requests, clients that leave and reloads for a while; what is lost, and what grows.

The shipped bundle is served by ``psc-serve`` as it is by default: with fronts, an engine and the backend that it
measures.  Other options than these are given to it, such as ``--workers=0 --backend=folded``.  Memory, descriptors and
threads are summed over its processes; what several share counts once.  Every answer is compared with the first of its
kind.  The slope of the memory is fitted to the means of ten equal pieces of the last half: neighbouring readings
depend on each other, so their own scatter would understate its error.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import numpy as np
from scipy.stats import linregress

from app.grpc import METHODS, PREFIX
from tests.app.grpc.support import free_port
from tests.conftest import SHIPPED_BUNDLE
from tests.served import serve

KEY = "soak-key-of-thirty-two-characters"
IMAGES = [(SHIPPED_BUNDLE / "examples" / f"{name}.png").read_bytes() for name in ("clean", "ambiguous", "shirt")]
INFER = f"/v2/models/{SHIPPED_BUNDLE.name}/infer"
GRPC_PORT = free_port()
PIECES = 10


class Reading(NamedTuple):
    """Of all processes, at ``seconds`` since the start."""

    seconds: float
    memory: int
    descriptors: int
    threads: int


class Soak(NamedTuple):
    """What came of it."""

    answered: Counter[str]
    lost: list[str]
    readings: list[Reading]


def predict(client: httpx.Client) -> Any:
    return _predictions(client.post("/predict", content=IMAGES[0], headers={"content-type": "image/png"}))


def multipart(client: httpx.Client) -> Any:
    files = [("images", (f"{index}.png", image)) for index, image in enumerate(IMAGES)]
    return _predictions(client.post("/predict?explain=true", files=files))


def json_body(client: httpx.Client) -> Any:
    images = [{"b64": base64.b64encode(image).decode()} for image in IMAGES]
    return _predictions(client.post("/predict", json={"images": images}))


def v2(client: httpx.Client) -> Any:
    data = [number % 256 for number in range(2 * 28 * 28)]
    tensor = {"name": "images", "datatype": "UINT8", "shape": [2, 1, 28, 28], "data": data}
    answer = client.post(INFER, json={"inputs": [tensor]})
    answer.raise_for_status()
    return next(output["data"] for output in answer.json()["outputs"] if output["name"] == "class_index")


def call(_client: httpx.Client) -> Any:
    """On a connection of its own to the port of gRPC."""
    request, response = METHODS["ModelInfer"]
    data = b"".join(len(image).to_bytes(4, "little") + image for image in IMAGES)
    tensor = {"name": "encoded_images", "datatype": "BYTES", "shape": [len(IMAGES)]}
    message = request(model_name=SHIPPED_BUNDLE.name, inputs=[tensor], raw_input_contents=[data])
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        infer = channel.unary_unary(PREFIX + "ModelInfer", request.SerializeToString, response.FromString)
        answer = infer(message, timeout=60)
    outputs = zip(answer.outputs, answer.raw_output_contents, strict=True)
    return next(content for output, content in outputs if output.name == "class_index")


def damaged(client: httpx.Client) -> Any:
    return client.post("/predict", content=IMAGES[0][:200], headers={"content-type": "image/png"}).status_code


def leave(client: httpx.Client) -> None:
    """Before the answer, or before the whole body."""
    with httpx.Client(base_url=client.base_url, timeout=0.002) as other, suppress(httpx.TransportError):
        other.post("/predict", content=IMAGES[1], headers={"content-type": "image/png"})


KINDS: tuple[Callable[[httpx.Client], Any], ...] = (predict, multipart, json_body, v2, call, damaged, leave)


def _predictions(answer: httpx.Response) -> Any:
    answer.raise_for_status()
    return [(each["label"], each["decision"]) for each in answer.json()["predictions"]]


def read_processes(pids: Sequence[int], seconds: float) -> Reading:
    """From ``/proc``; one that has just ended has nothing."""
    found = []
    for folder in (Path(f"/proc/{pid}") for pid in pids):
        with suppress(FileNotFoundError, ProcessLookupError):
            memory = 1024 * int((folder / "smaps_rollup").read_text().partition("Pss:")[2].split()[0])
            found.append((memory, *(sum(1 for _ in (folder / name).iterdir()) for name in ("fd", "task"))))
    return Reading(seconds, *map(sum, zip(*found, strict=True)))


def slope(readings: Sequence[Reading]) -> tuple[float, float]:
    """Growth of the memory in the last half and its standard error, bytes an hour."""
    last = [each for each in readings if each.seconds >= readings[-1].seconds / 2]
    pieces = np.array_split(np.array([(each.seconds, each.memory) for each in last], float), PIECES)
    fit = linregress(*np.array([piece.mean(axis=0) for piece in pieces]).T)
    return 3600 * float(fit.slope), 3600 * float(fit.stderr)


def soak(minutes: float, clients: int, reload_seconds: float, pause: float, *flags: str) -> Soak:
    """Serve, send and read for so long."""
    answered: Counter[str] = Counter()
    lost: list[str] = []
    readings: list[Reading] = []
    ended = threading.Event()

    def send(url: str, seed: int, expected: dict[str, Any]) -> None:
        choose = random.Random(seed)
        with httpx.Client(base_url=url, timeout=60) as client:
            while not ended.wait(pause):
                kind = choose.choice(KINDS)
                try:
                    answer = kind(client)
                except Exception as error:
                    lost.append(f"{kind.__name__}: {error!r}")
                    continue
                answered[kind.__name__] += 1
                if answer != expected[kind.__name__]:
                    lost.append(f"{kind.__name__}: {answer}")

    def reload(url: str) -> None:
        with httpx.Client(base_url=url, timeout=600, headers={"x-api-key": KEY}) as client:
            while not ended.wait(reload_seconds):
                try:
                    status: object = client.post("/admin/reload").status_code
                except httpx.HTTPError as error:
                    status = repr(error)
                answered["reload"] += 1
                if status != 200:
                    lost.append(f"reload: {status}")

    own = f"--bundle={SHIPPED_BUNDLE}", f"--admin-keys={KEY}", f"--grpc-port={GRPC_PORT}"
    with serve(*own, *flags, default=True) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            expected = {kind.__name__: kind(client) for kind in KINDS}
        threads = [threading.Thread(target=send, args=(server.url, seed, expected)) for seed in range(clients)]
        threads.append(threading.Thread(target=reload, args=(server.url,)))
        for thread in threads:
            thread.start()
        began = time.monotonic()
        while (seconds := time.monotonic() - began) < 60 * minutes:
            readings.append(read_processes([server.process.pid, *server.children.values()], seconds))
            time.sleep(min(1.0, 60 * minutes / 100))
        ended.set()
        for thread in threads:
            thread.join()
        if (code := server.terminate()) != 0:
            lost.append(f"the service ended with {code}")
        lost += [line for line in server.log if not line.startswith("{") or json.loads(line)["level"] == "error"]
    return Soak(answered, lost, readings)


def report(run: Soak) -> list[str]:
    """Lines of a table."""
    growth, error = (each / 2**20 for each in slope(run.readings))
    half = run.readings[len(run.readings) // 2 :]
    ends = {name: [getattr(each, name) for each in half] for name in ("descriptors", "threads")}
    return [
        "| what | seen |",
        "| --- | --- |",
        f"| answered in {run.readings[-1].seconds / 60:.0f} minutes | "
        f"{', '.join(f'{count} {name}' for name, count in sorted(run.answered.items()))} |",
        f"| lost, wrong, or an error in the log | {len(run.lost)} |",
        f"| memory at the start, in the middle, at the end | "
        f"{', '.join(f'{each.memory / 2**20:.0f} MiB' for each in (run.readings[0], half[0], half[-1]))} |",
        f"| its growth in the last half | {growth:+.2f} ± {error:.2f} MiB an hour |",
        *(f"| {name} in the last half | {min(values)} to {max(values)} |" for name, values in ends.items()),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 1 when something was lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--reload-seconds", type=float, default=20)
    parser.add_argument("--pause", type=float, default=0.02, help="of each client between two requests, seconds")
    options, flags = parser.parse_known_args(arguments)
    run = soak(options.minutes, options.clients, options.reload_seconds, options.pause, *flags)
    print("\n".join([*report(run), *run.lost[:20]]))
    return 1 if run.lost else 0


if __name__ == "__main__":
    sys.exit(main())
