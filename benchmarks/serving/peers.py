"""psc-serve, LitServe, BentoML, Ray Serve, mosec and naive FastAPI, serving the same bundles on this machine.

    python -m benchmarks.serving.peers --seconds 2 --rounds 5 --sweeps 3
    python -m benchmarks.serving.peers --only psc fastapi --device cuda
    python -m benchmarks.serving.peers --installed --photographs BUNDLE --side 224 --device cuda
    python -m benchmarks.serving.peers --report             # the plot and the section of serving.md, from the JSON

Each peer is installed into ``out/peers/NAME`` if it is not there; with ``--installed``, where nothing can be, those run
that this interpreter has.  ``--photographs`` serves another bundle to photographs.  A table is one case on one
instruction set, the same for all its servers; only the compute-bound case has one for each set of the CPU.  All servers
of a table run at once, suspended (SIGSTOP) except the one whose turn it is.  Rounds come first: 64 clients that send
single images in a closed loop; one such client (the unloaded latency); and, where a request may carry several images,
four clients that send 32 each.  Every round also has a turn of the bare device step.  A machine's speed changes within
minutes, so ratios are taken within a round; the report has their medians.  Then sweeps: Poisson arrivals at rates that
are the same for all servers (:mod:`benchmarks.serving.curve`).  One load generator sends the requests from a process of
its own.  Writes ``serving-peers.json``.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from benchmarks.instruction_sets import available
from benchmarks.runs import BUNDLE, RESULTS, Json, environment
from benchmarks.serving import environments
from benchmarks.serving.images import digits, photographs
from benchmarks.serving.measure import Run, log, measure_ceilings, measure_table
from benchmarks.serving.overhead import make_bundle
from benchmarks.serving.peers_report import draw, name_of, write_report
from benchmarks.serving.running import CLIENTS, MANY, MANY_CLIENTS, Client
from benchmarks.serving.servers import BY_NAME, CASES, COMPUTE, OVERHEAD, PHOTOGRAPHS, SERVERS, Server
from benchmarks.serving.targets import targets


def new_record(args: argparse.Namespace, servers: list[Server]) -> Json:
    """A record without measurements."""
    return {
        "command": command(args),
        "environment": environment(torch.device(args.device)),
        "device": args.device,
        "note": args.note,
        "seconds": args.seconds,
        "sweeps": args.sweeps,
        "clients": CLIENTS,
        "many": {"images": MANY, "clients": MANY_CLIENTS},
        "settings": {server.name: server.settings for server in servers},
        "tables": [new_table(case, instructions) for case, instructions in planned(args)],
        "ceilings": {},
    }


def command(args: argparse.Namespace) -> str:
    """The command line, without what is said elsewhere in the record."""
    words = [
        f"python -m benchmarks.serving.peers --seconds {args.seconds:g} --rounds {args.rounds} --sweeps {args.sweeps}"
    ]
    words += [f"--cases {' '.join(args.cases)}"] if args.cases else []
    words += [f"--only {' '.join(args.only)}"] if args.only else []
    words += ["--best-instructions"] if args.best_instructions else []
    words += ["--installed"] if args.installed else []
    words += [f"--photographs {args.photographs.name}"] if args.photographs else []
    words += [f"--side {args.side}"] if args.side else []
    words += [f"--device {args.device}"] if args.device != "cpu" else []
    return " ".join(words)


def planned(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Case and instruction set of every table: the best set for all cases, older ones for the compute-bound case."""
    sets = available() if args.device == "cpu" else available()[-1:]
    chosen = sets[-1:] if args.best_instructions else sets
    return [(case, name) for case in args.cases or CASES for name in (chosen if case == COMPUTE else sets[-1:])]


def new_table(case: str, instructions: str) -> Json:
    """A table without measurements."""
    title = f"{case}, {instructions}"
    return {
        "title": title,
        "case": case,
        "instruction_set": instructions,
        "servers": {},
        "bare": [],
        "slowest_peak": 0.0,
    }


def installed(servers: list[Server]) -> list[Server]:
    """Those that this interpreter has, to be run by it."""
    there = [server for server in servers if server.requirement is None or find_spec(server.packages[0])]
    for server in servers:
        if server not in there:
            log(f"{server.label}: not installed, left out")
    return [replace(server, requirement=None) for server in there]


def bundle_of(case: str) -> Path:
    """The bundle that a case serves; made if it is not there."""
    if case == COMPUTE:
        return BUNDLE
    folder = environments.HOME / case
    if (folder / "manifest.json").exists():
        return folder
    return make_bundle(folder, photographs=case == PHOTOGRAPHS)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--cases", nargs="+", choices=CASES, metavar="CASE", help=f"only these: {'; '.join(CASES)}")
    cli.add_argument("--best-instructions", action="store_true", help="no table for an older instruction set")
    cli.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME", help="only these servers")
    cli.add_argument("--seconds", type=float, default=2.0, help="length of a phase")
    cli.add_argument("--rounds", type=int, default=5, help="closed loops of every server")
    cli.add_argument("--sweeps", type=int, default=3, help="curves of every server")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of every server")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--installed", action="store_true", help="install nothing, leave out what is not there")
    cli.add_argument("--photographs", type=Path, metavar="BUNDLE", help="serve this in the case of photographs")
    cli.add_argument("--side", type=int, metavar="PIXELS", help="photographs are squares of this side, not 640 × 480")
    cli.add_argument("--build", action="store_true", help="only install the peers")
    cli.add_argument("--report", action="store_true", help="only write the plot and the section of serving.md")
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    return cli


def main() -> int:
    """Measure, or write the report of what was measured."""
    args = parser().parse_args()
    file = args.out / f"{name_of(args.device)}.json"
    if args.report:
        write_report(json.loads(file.read_text()), args.out)
        return 0
    servers = [server for server in SERVERS if not args.only or server.name in args.only]
    if args.installed:
        servers = installed(servers)
    for server in servers:
        log(f"{server.label}: {server.python()}")
    if args.build:
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # So that no server is left behind.
    images = {PHOTOGRAPHS: photographs(32, (args.side, args.side)) if args.side else photographs(32)}
    inputs = {case: (bundle_of(case), images.get(case) or digits(256)) for case in CASES}
    if args.photographs:
        inputs[PHOTOGRAPHS] = args.photographs, images[PHOTOGRAPHS]
    with Client() as client:
        run = Run(file, new_record(args, servers), servers, args.device, args.seconds, args.rounds, args.sweeps, client)
        for table in run.record["tables"]:
            measure_table(run, table, *inputs[table["case"]])
        measure_ceilings(run, {case: inputs[case] for case in (OVERHEAD, PHOTOGRAPHS)})
    run.record["targets"] = targets(run.record)
    run.write()
    draw(run.record, args.out)
    for target in run.record["targets"]:
        print(f"{'met    ' if target['met'] else 'NOT MET'}  {target['target']}: {target['measured']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
