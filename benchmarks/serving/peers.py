"""psc-serve, LitServe, BentoML, Ray Serve, mosec and naive FastAPI, serving the same bundles on this machine.

    python -m benchmarks.serving.peers --seconds 2 --rounds 5 --sweeps 2
    python -m benchmarks.serving.peers --only psc fastapi --device cuda
    python -m benchmarks.serving.peers --installed --cases photographs --untrained torchvision:resnet50 --device cuda

A missing peer is installed into ``out/peers/NAME``; with ``--installed``, only the peers that this interpreter has are
run, for machines on which nothing can be installed.  ``--untrained`` serves a ResNet with random weights to
photographs, in bfloat16 on a GPU.

A table is one case on one instruction set, the same for all its servers; only the compute-bound case has a table for
each set of the CPU.  All servers of a table run at once, suspended (SIGSTOP) except for the one whose turn it is.  The
rounds come first: 64 clients that send single images in a closed loop; one such client (the unloaded latency); and, if
a request may carry several images, four clients that send 32 each.  Every round also measures the bare device step.  A
machine's speed changes within minutes, so ratios are taken within a round, and the tables have their medians.  The
sweeps follow: Poisson arrivals at rates that are the same for all servers (:mod:`benchmarks.serving.curve`).  One load
generator sends the requests from a process of its own.  The results are ``serving-peers.json`` and the plot.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.instruction_sets import available, held_to, in_fresh_process
from benchmarks.runs import BUNDLE, RESULTS, ROOT, Json, origin, plain_parser, write_json
from benchmarks.serving import curve, inputs
from benchmarks.serving.ceilings import BareSteps, decode_only
from benchmarks.serving.report import draw, fragment, name_of
from benchmarks.serving.running import CLIENTS, MANY, MANY_CLIENTS, Client, RunningServer, ServerFailed
from benchmarks.serving.servers import (
    BY_NAME,
    CASES,
    COMPUTE,
    DECODED,
    HOME,
    OURS,
    OVERHEAD,
    PHOTOGRAPHS,
    SERVERS,
    Server,
)

Inputs = tuple[Path, list[bytes]]  # A bundle, and the files to send.

SETTLE_SECONDS = 5.0  # Before servers are suspended: Ray Serve loses its proxy if it is suspended while starting.


def new_record(args: argparse.Namespace, servers: list[Server]) -> Json:
    return {
        **origin(args, torch.device(args.device)),
        "device": args.device,
        "seconds": args.seconds,
        "rounds": args.rounds,
        "sweeps": args.sweeps,
        "load": args.load,
        "clients": CLIENTS,
        "many": {"images": MANY, "clients": MANY_CLIENTS},
        "settings": {server.name: server.settings for server in servers},
        "tables": [
            {
                "title": f"{case}, {instructions}",
                "case": case,
                "served": f"JPEG files of 640 × 480 and 100 kB; {args.untrained} with random weights, ten classes"
                if args.untrained and case in (PHOTOGRAPHS, DECODED)
                else CASES[case],
                "instruction_set": instructions,
                "servers": {},
                "bare": [],
                "slowest_peak": 0.0,
            }
            for case, instructions in planned(args)
        ],
        "ceilings": {"decode": {}},
    }


def keep_others(record: Json, before: Json) -> None:
    """Keep an earlier run's measurements of other cases."""
    measured = {table["case"] for table in record["tables"]}
    kept = [table for table in before["tables"] if table["case"] not in measured]
    record["tables"] = sorted([*kept, *record["tables"]], key=lambda table: list(CASES).index(table["case"]))
    record["ceilings"]["decode"] |= before["ceilings"]["decode"]


def planned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return case and instruction set of every table: older sets only for the compute-bound case."""
    sets = available() if args.device == "cpu" else available()[-1:]
    chosen = sets[-1:] if args.best_instructions else sets
    return [(case, name) for case in args.cases for name in (chosen if case == COMPUTE else sets[-1:])]


def installed(servers: list[Server]) -> list[Server]:
    """Return the servers that this interpreter has installed, to be run by it."""
    there = [server for server in servers if server.requirement is None or find_spec(server.packages[0])]
    for server in servers:
        if server not in there:
            log(f"{server.label}: not installed, left out")
    return [replace(server, requirement=None) for server in there]


def inputs_of(case: str, untrained: str | None, device: str) -> Inputs:
    """Return the bundle and the files of a case; a missing bundle is made."""
    if case == COMPUTE:
        return BUNDLE, inputs.digits(256)
    large = untrained if case in (PHOTOGRAPHS, DECODED) else None
    folder = HOME / f"bundle-{large or case.removesuffix('-decoded')}".replace(":", "-")
    if not (folder / "manifest.json").exists():
        if large:
            inputs.untrained(folder, large, device)
        else:
            inputs.small(folder, photographs=case != OVERHEAD)
    images = inputs.digits(256) if case == OVERHEAD else inputs.photographs(32)
    return folder, images


def slowest_peak(found: Json) -> float:
    """Return the requests/s of the slowest peer in a closed loop, median of the rounds; without peers, our own."""
    peaks = {
        name: statistics.median(turn["closed"]["requests_per_s"] for turn in one["rounds"])
        for name, one in found.items()
        if one.get("rounds")
    }
    peers = {name: peak for name, peak in peaks.items() if name not in OURS}
    return min((peers or peaks).values(), default=0.0)


def measure_table(
    record: Json, table: Json, shown: list[Server], given: Inputs, client: Client, write: Callable[[], None]
) -> None:
    """Run the rounds, then the sweeps; a server that fails is left out from then on, and the reason recorded."""
    found, device, seconds = table["servers"], record["device"], record["seconds"]
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
            started = RunningServer(server, table["case"], *given, device)
            stack.callback(started.close)
            running[server.name] = started
            found[server.name] = {**started.about, "rounds": [], "sweeps": []}

        def take_turn(name: str) -> None:
            turn = running[name].turn(client, seconds, record["load"])
            found[name]["rounds"].append(turn)
            log(f"  {name}: {', '.join(map(_short, turn.values()))}")

        def offer(name: str, per_s: float) -> Json | None:
            if name not in running:
                return None
            point = attempt(name, lambda: running[name].point(client, per_s, seconds))
            if point is not None:
                log(f"  {name} at {per_s:g}/s: {_short(point)} {point['end'] or ''}")
            return point

        log(f"{table['title']}: {', '.join(server.label for server in shown)} start")
        with ThreadPoolExecutor(1 if device == "cpu" else len(shown)) as pool:  # A GPU's machine has cores for all.
            list(pool.map(lambda server: attempt(server.name, partial(start, server)), shown))
        running = {server.name: running[server.name] for server in shown if server.name in running}
        bare = BareSteps(given[0], device)
        stack.callback(bare.close)
        time.sleep(SETTLE_SECONDS)
        for started in running.values():
            started.stop()
        for number in range(record["rounds"]):
            log(f"{table['title']}: round {number + 1} of {record['rounds']}")
            table["bare"].append(bare.measure(seconds))
            for name in _rotated(list(running), number):
                attempt(name, partial(take_turn, name))
            write()
        table["slowest_peak"] = peak = slowest_peak({name: found[name] for name in running})
        for number in range(record["sweeps"] if peak else 0):
            log(f"{table['title']}: sweep {number + 1} of {record['sweeps']}")
            for name, points in curve.sweep(peak, _rotated(list(running), number), offer).items():
                if name in running:
                    found[name]["sweeps"].append(points)
            write()


def failed(error: Exception) -> Json:
    """Describe a failure, without paths of this machine."""
    reason = str(error).replace(str(ROOT), "")[-600:]
    log(f"  failed: {reason}")
    return {"failed": reason}


def _rotated(names: list[str], by: int) -> list[str]:
    by %= max(1, len(names))
    return names[by:] + names[:by]


def _short(phase: Json) -> str:
    p50, p99 = (phase.get(key) for key in ("p50_ms", "p99_ms"))
    return f"{phase['requests_per_s']:g}/s p50 {p50} p99 {p99} ms {phase['statuses']}"


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    cli = plain_parser(__doc__)
    cli.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="; ".join(CASES))
    cli.add_argument("--keep", action="store_true", help="keep the tables of other cases that --out holds")
    cli.add_argument("--best-instructions", action="store_true", help="no table for an older instruction set")
    cli.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME", help="only these servers")
    cli.add_argument("--seconds", type=float, default=2.0, help="length of a phase")
    cli.add_argument("--rounds", type=int, default=5, help="closed loops of every server")
    cli.add_argument("--sweeps", type=int, default=3, help="curves of every server")
    cli.add_argument("--load", type=float, metavar="PART", help="also Poisson arrivals at this part of its own peak")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of every server")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--installed", action="store_true", help="install nothing, leave out what is not there")
    cli.add_argument("--untrained", metavar="SPEC", help="serve this ResNet to photographs, e.g. torchvision:resnet50")
    return cli


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    servers = [server for server in SERVERS if not args.only or server.name in args.only]
    if args.installed:
        servers = installed(servers)
    for server in servers:
        log(f"{server.label}: {server.python()}")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # Unwinds the blocks that terminate the servers.
    given = {case: inputs_of(case, args.untrained, args.device) for case in args.cases}
    record, file = new_record(args, servers), args.out / f"{name_of(args.device)}.json"
    measured = record["tables"]
    if args.keep and file.exists():
        keep_others(record, json.loads(file.read_text()))
    write = partial(write_json, file, record)
    with Client() as client:
        for table in measured:
            measure_table(record, table, servers, given[table["case"]], client, write)
    for case, files in given.items():
        record["ceilings"]["decode"][case] = in_fresh_process(decode_only, *files, args.seconds)
    write()
    draw(record, args.out)
    print(fragment(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
