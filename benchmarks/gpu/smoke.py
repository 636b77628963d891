"""Every path of a GPU once, within minutes: a table of what passed, what failed and the error's first line.

    python -m benchmarks.gpu.smoke --device cuda
    python -m benchmarks.gpu.smoke --device cpu            # a rehearsal: what only a GPU can do is skipped, and said so
    python -m benchmarks.gpu.smoke --device cuda --only graph reload

Goes on after a failure.  What passed is kept in ``smoke-DEVICE.json`` and not run again, unless ``--again``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch

from benchmarks.gpu import smoke_model, smoke_service
from benchmarks.gpu.checks import Check, Outcome, Worker
from benchmarks.runs import Json, environment, markdown_table, write_json

CHECKS: dict[str, Check] = {
    "device": smoke_model.answers,
    "equals cpu": smoke_model.equals_cpu,
    "graph": smoke_model.graph,
    "replay": smoke_model.replay,
    "hooks": smoke_model.hooks,
    "bf16": smoke_model.bf16,
    "explain": smoke_model.explain,
    "out of memory": smoke_service.out_of_memory,
    "service": smoke_service.service,
    "two bundles": smoke_service.two_bundles,
    "reload": smoke_service.reload,
    "gauges": smoke_service.gauges,
    "224 pixels": smoke_model.large,
    "1000 classes": smoke_model.many_classes,
    "fit": smoke_model.fit,
    "fit bf16": smoke_model.fit_bf16,
    "profiler": smoke_model.profiler,
    "busy": smoke_model.busy,
    "compile": smoke_model.compiled,
}
"""In this order, the longest last."""

SECONDS, COMPILING_SECONDS = 60.0, 180.0
"""Of a check, at most."""


def table(outcomes: dict[str, Outcome]) -> str:
    """What passed and what failed."""
    rows = [[name, each.state, f"{each.seconds:.1f}", each.note] for name, each in outcomes.items()]
    return markdown_table(["check", "outcome", "seconds", "note or first line of the error"], rows)


def main(argv: list[str] | None = None) -> int:
    """Run the checks; 1 if one failed."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    cli.add_argument("--again", action="store_true", help="also run what passed before")
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    device = torch.device(args.device)
    file = args.out / f"smoke-{device.type}.json"
    args.out.mkdir(parents=True, exist_ok=True)
    kept: Json = json.loads(file.read_text())["checks"] if file.exists() else {}
    outcomes = {name: Outcome(**kept[name]) for name in CHECKS if name in kept}
    worker = Worker(CHECKS, device)
    for name in args.only or CHECKS:
        if not args.again and name in outcomes and outcomes[name].state == "passed":
            continue
        outcomes[name] = outcome = worker.run(name, COMPILING_SECONDS if name == "compile" else SECONDS)
        print(f"{name}: {outcome.state}, {outcome.seconds:.1f} s  {outcome.note}", flush=True)
        checks = {key: outcomes[key]._asdict() for key in CHECKS if key in outcomes}
        write_json(file, {"environment": environment(device), "checks": checks})
    worker.close()
    outcomes = {name: outcomes[name] for name in CHECKS if name in outcomes}
    for name, outcome in outcomes.items():
        if outcome.trace:
            print(f"\n== {name}\n{outcome.trace}", file=sys.stderr)
    print("\n" + table(outcomes))
    return int(any(outcome.state == "failed" for outcome in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
