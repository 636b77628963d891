"""All turns of all servers in one table."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.instruction_sets import held_to
from benchmarks.runs import ROOT, Json, write_json
from benchmarks.serving import curve
from benchmarks.serving.ceilings import BareSteps
from benchmarks.serving.processes import ServerFailed
from benchmarks.serving.running import Client, RunningServer
from benchmarks.serving.servers import OURS, Server

SETTLE_SECONDS = 5.0
"""Between the last server's start and the first stop: Ray Serve loses its proxy when it is stopped while starting."""


@dataclass
class Run:
    """What is measured, and the record, which is written after every part.

    Attributes:
        file: The record's.
        record: As :mod:`benchmarks.serving.peers` starts it.
        servers: In the order of the tables.
        device: cpu or cuda.
        seconds: Of a phase.
        rounds: Closed loops of every server.
        sweeps: Curves of every server.
        client: The load generator.
    """

    file: Path
    record: Json
    servers: Sequence[Server]
    device: str
    seconds: float
    rounds: int
    sweeps: int
    client: Client

    def write(self) -> None:
        """Write what was measured so far."""
        write_json(self.file, self.record)


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def slowest_peak(found: Json) -> float:
    """Requests/s of the slowest peer in a closed loop, median of the rounds; of our own without peers.

    Args:
        found: Of a case, by server.
    """
    peaks = {
        name: statistics.median(turn["closed"]["requests_per_s"] for turn in one["rounds"])
        for name, one in found.items()
        if one.get("rounds")
    }
    peers = {name: peak for name, peak in peaks.items() if name not in OURS}
    return min((peers or peaks).values(), default=0.0)


def measure_table(run: Run, table: Json, bundle: Path, images: Sequence[bytes]) -> None:
    """Rounds, then sweeps; a server that fails is left out from then on, and the reason recorded.

    Args:
        run: Its record is written after every part.
        table: One of the record's, without measurements.
        bundle: To serve.
        images: Files to send.
    """
    case, found = table["case"], table["servers"]
    with held_to(table["instruction_set"]), contextlib.ExitStack() as stack:
        running: dict[str, RunningServer] = {}

        def attempt(name: str, act: Callable[[], Json | None]) -> Json | None:
            try:
                return act()
            except (ServerFailed, OSError, RuntimeError, KeyError, ValueError) as error:
                running.pop(name, None)
                found[name] = failed(error)
                return None

        def start(server: Server) -> None:
            started = RunningServer(server, case, bundle, images, run.device)
            stack.callback(started.close)
            running[server.name] = started
            found[server.name] = {**started.about, "rounds": [], "sweeps": []}

        def take_turn(name: str) -> None:
            turn = running[name].turn(run.client, run.seconds)
            found[name]["rounds"].append(turn)
            log(f"  {name}: {', '.join(map(_short, turn.values()))}")

        def offer(name: str, per_s: float) -> Json | None:
            if name not in running:
                return None
            point = attempt(name, lambda: running[name].point(run.client, per_s, run.seconds))
            if point is not None:
                log(f"  {name} at {per_s:g}/s: {_short(point)} {point['end'] or ''}")
            return point

        for server in run.servers:
            log(f"{table['title']}: {server.label} starts")
            attempt(server.name, partial(start, server))
        bare = BareSteps(bundle, run.device)
        stack.callback(bare.close)
        time.sleep(SETTLE_SECONDS)
        for started in running.values():
            started.stop()
        for number in range(run.rounds):
            log(f"{table['title']}: round {number + 1} of {run.rounds}")
            table["bare"].append(bare.measure(run.seconds))
            for name in _rotated(list(running), number):
                attempt(name, partial(take_turn, name))
            run.write()
        table["slowest_peak"] = peak = slowest_peak({name: found[name] for name in running})
        for number in range(run.sweeps if peak else 0):
            log(f"{table['title']}: sweep {number + 1} of {run.sweeps}")
            for name, points in curve.sweep(peak, _rotated(list(running), number), offer).items():
                if name in running:
                    found[name]["sweeps"].append(points)
            run.write()


def failed(error: Exception) -> Json:
    """The record of a failure, without paths of this machine."""
    reason = str(error).replace(str(ROOT), "")[:600]
    log(f"  failed: {reason}")
    return {"failed": reason}


def _rotated(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


def _short(phase: Json) -> str:
    p50, p99 = (phase.get(key) for key in ("p50_ms", "p99_ms"))
    return f"{phase['requests_per_s']:g}/s p50 {p50} p99 {p99} ms {phase['statuses']}"
