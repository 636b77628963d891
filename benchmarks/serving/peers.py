"""psc-serve, LitServe, BentoML, Ray Serve, mosec and naive FastAPI, serving the same bundles on this machine.

    python -m benchmarks.serving.peers --seconds 2 --rounds 5 --sweeps 2
    python -m benchmarks.serving.peers --only psc fastapi --device cuda
    python -m benchmarks.serving.peers --installed --cases photographs --untrained "ResNet-50, 224" --device cuda

Each peer is installed into ``out/peers/NAME`` if it is not there; with ``--installed``, where nothing can be, those run
that this interpreter has.  ``--untrained`` serves a network of the device benchmark to photographs of its size.

A table is one case on one instruction set, the same for all its servers; only the compute-bound case has one for each
set of the CPU.  All servers of a table run at once, suspended (SIGSTOP) except the one whose turn it is.  Rounds come
first: 64 clients that send single images in a closed loop; one such client (the unloaded latency); and, where a request
may carry several images, four clients that send 32 each.  Every round also has a turn of the bare device step.  A
machine's speed changes within minutes, so ratios are taken within a round; the tables have their medians.  Then sweeps:
Poisson arrivals at rates that are the same for all servers (:mod:`benchmarks.serving.curve`).  One load generator sends
the requests from a process of its own.  Writes ``serving-peers.json`` and the plot.
"""

from __future__ import annotations

import argparse
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.gpu import bundles
from benchmarks.instruction_sets import available, in_fresh_process
from benchmarks.runs import BUNDLE, RESULTS, Json, origin, plain_parser
from benchmarks.serving.ceilings import decode_only
from benchmarks.serving.images import digits, photographs
from benchmarks.serving.measure import Run, log, measure_table
from benchmarks.serving.overhead import make_bundle
from benchmarks.serving.report import draw, fragment, name_of
from benchmarks.serving.running import CLIENTS, MANY, MANY_CLIENTS, Client
from benchmarks.serving.servers import BY_NAME, CASES, COMPUTE, HOME, PHOTOGRAPHS, SERVERS, Server

Inputs = tuple[Path, list[bytes]]
"""A bundle, and files to send."""


def new_record(args: argparse.Namespace, servers: list[Server]) -> Json:
    """A record without measurements."""
    return {
        **origin(args, torch.device(args.device)),
        "device": args.device,
        "seconds": args.seconds,
        "sweeps": args.sweeps,
        "clients": CLIENTS,
        "many": {"images": MANY, "clients": MANY_CLIENTS},
        "settings": {server.name: server.settings for server in servers},
        "tables": [
            {
                "title": f"{case}, {instructions}",
                "case": case,
                "instruction_set": instructions,
                "servers": {},
                "bare": [],
                "slowest_peak": 0.0,
            }
            for case, instructions in planned(args)
        ],
        "ceilings": {"decode": {}},
    }


def planned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Case and instruction set of every table: the best set for all cases, older ones for the compute-bound case."""
    sets = available() if args.device == "cpu" else available()[-1:]
    chosen = sets[-1:] if args.best_instructions else sets
    return [(case, name) for case in args.cases for name in (chosen if case == COMPUTE else sets[-1:])]


def installed(servers: list[Server]) -> list[Server]:
    """Those that this interpreter has, to be run by it."""
    there = [server for server in servers if server.requirement is None or find_spec(server.packages[0])]
    for server in servers:
        if server not in there:
            log(f"{server.label}: not installed, left out")
    return [replace(server, requirement=None) for server in there]


def inputs_of(case: str, untrained: str | None) -> Inputs:
    """What a case serves and sends; bundles are made if they are not there."""
    if case == COMPUTE:
        return BUNDLE, digits(256)
    if case == PHOTOGRAPHS and untrained:
        side = bundles.subject(untrained).size
        folder = HOME / untrained.replace(", ", "-").lower()
        if not (folder / "manifest.json").exists():
            bundles.untrained(untrained).save(folder)
        return folder, photographs(32, (side, side))
    folder = HOME / case
    if not (folder / "manifest.json").exists():
        make_bundle(folder, photographs=case == PHOTOGRAPHS)
    return folder, photographs(32) if case == PHOTOGRAPHS else digits(256)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = plain_parser(__doc__)
    cli.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE", help="; ".join(CASES))
    cli.add_argument("--best-instructions", action="store_true", help="no table for an older instruction set")
    cli.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME", help="only these servers")
    cli.add_argument("--seconds", type=float, default=2.0, help="length of a phase")
    cli.add_argument("--rounds", type=int, default=5, help="closed loops of every server")
    cli.add_argument("--sweeps", type=int, default=3, help="curves of every server")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of every server")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--installed", action="store_true", help="install nothing, leave out what is not there")
    cli.add_argument("--untrained", metavar="NETWORK", help="serve this network of the device benchmark to photographs")
    return cli


def main(argv: list[str] | None = None) -> int:
    """Measure and write."""
    args = parser().parse_args(argv)
    servers = [server for server in SERVERS if not args.only or server.name in args.only]
    if args.installed:
        servers = installed(servers)
    for server in servers:
        log(f"{server.label}: {server.python()}")
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that no server is left behind.
    inputs = {case: inputs_of(case, args.untrained) for case in args.cases}
    file = args.out / f"{name_of(args.device)}.json"
    with Client() as client:
        run = Run(file, new_record(args, servers), servers, args.device, args.seconds, args.rounds, args.sweeps, client)
        for table in run.record["tables"]:
            measure_table(run, table, *inputs[table["case"]])
    for case, given in inputs.items():
        run.record["ceilings"]["decode"][case] = in_fresh_process(decode_only, *given, run.seconds)
    run.write()
    draw(run.record, args.out)
    print(fragment(run.record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
