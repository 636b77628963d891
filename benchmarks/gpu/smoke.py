"""Run the checks that no test of ``tests/gpu`` covers, within minutes: a table of what passed, failed, and why.

    python -m benchmarks.gpu.smoke --device cuda
    python -m benchmarks.gpu.smoke --device cpu            # a rehearsal, which skips and names what only a GPU can do
    python -m benchmarks.gpu.smoke --device cuda --only reload gauges

Each check runs in a process of its own, because an error of the GPU may end the process or leave it useless.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.checks import CHECKS, SKIPPED
from benchmarks.runs import Json, environment, markdown_table, plain_parser, write_json

SECONDS = 300.0
"""The time limit of a check, seconds."""


def run(name: str, device: str, seconds: float = SECONDS) -> Json:
    """Return state and note of a check; the note of a failed one is the last line of its error."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.gpu.checks", name, device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except subprocess.TimeoutExpired:
        state, note = "failed", f"no result after {seconds:g} s"
    else:
        state = {0: "passed", SKIPPED: "skipped"}.get(done.returncode, "failed")
        said = (done.stderr if state == "failed" else done.stdout).strip()
        note = said.splitlines()[-1][:200] if said else f"its process ended with {done.returncode}"
        if state == "failed":
            print(said, file=sys.stderr, flush=True)
    return {"state": state, "seconds": round(time.perf_counter() - began, 1), "note": note}


def main(argv: list[str] | None = None) -> int:
    """Run the checks; return 1 if one failed."""
    cli = plain_parser(__doc__)
    cli.add_argument("--device", default="cuda")
    cli.add_argument("--only", nargs="+", choices=list(CHECKS), metavar="CHECK", help=", ".join(CHECKS))
    cli.add_argument("--out", type=Path, default=Path("out/gpu"))
    args = cli.parse_args(argv)
    device = torch.device(args.device)
    checks: Json = {}
    for name in args.only or CHECKS:
        checks[name] = found = run(name, args.device)
        print(f"{name}: {found['state']}, {found['seconds']} s  {found['note']}", flush=True)
        write_json(args.out / f"smoke-{device.type}.json", {"environment": environment(device), "checks": checks})
    rows = [[name, each["state"], str(each["seconds"]), each["note"]] for name, each in checks.items()]
    print("\n" + markdown_table(["check", "outcome", "seconds", "note or last line of the error"], rows))
    return int(any(each["state"] == "failed" for each in checks.values()))


if __name__ == "__main__":
    sys.exit(main())
