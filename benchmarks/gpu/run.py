"""What to measure on a machine with a GPU, in parts of at most eight minutes, each with its own files.

    python -m benchmarks.gpu.run smoke                          # two minutes: every path once; run it first
    python -m benchmarks.gpu.run device-small serving-digits    # any parts
    python -m benchmarks.gpu.run --device cpu                   # a rehearsal of all parts with a clock
    python -m benchmarks.gpu.run --list

A part is a command with a time limit; its log is ``OUT/PART-DEVICE.log`` and its results lie beside it.  A part that
ended well is not run again, unless ``--again``; one that ran out of time goes on where it was.  A rehearsal makes the
same calls with fewer images and rounds.  Parts that need the data sets are skipped without ``--data``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu.checks import NEEDS_CUDA
from benchmarks.runs import Json, environment, markdown_table, write_json

LIMIT_MINUTES = 8.0
GRACE_SECONDS = 15.0
"""Between the request to end and the end."""

PYTHON = sys.executable


@dataclass(frozen=True)
class Part:
    """A command of the plan.

    Attributes:
        module: What is run.
        words: Its arguments, with placeholders ``{device}``, ``{out}`` and ``{data}``.
        rehearsal: Its arguments on a CPU, the same by default; None if only CUDA can run it.
        minutes: Expected on a GPU; a guess until it was run.
    """

    module: str
    words: str
    rehearsal: str | None = ""
    minutes: float = 5.0

    def command(self, device: str, out: Path, data: Path | None) -> list[str]:
        """The command line on a device."""
        words = self.words if device == "cuda" or not self.rehearsal else self.rehearsal
        return [PYTHON, "-m", self.module, *shlex.split(words.format(device=device, out=out, data=data))]

    @property
    def needs_data(self) -> bool:
        """Whether it reads the data sets."""
        return "{data}" in self.words


_DEVICE = "--device {device} --out {out} --missing --only"
_SMALL = "tail 'ResNet-18, 28' 'ResNet-50, 32' 'VGG-16, 32' 'WRN-28-10, 32'"
_LARGE = "'ResNet-18, 224' 'ResNet-50, 224' 'VGG-16, 224'"
_PAPER = "--device {device} --out {out}/paper --checkpoints {out}/checkpoints --data {data}"
_REHEARSED = f"{_PAPER} --scale smoke"


def _paper(words: str, minutes: float) -> Part:
    full = f"{_PAPER} --scale full --epochs 40"
    return Part("benchmarks.paper.ddu_case_study", f"{full} {words}", f"{_REHEARSED} {words}", minutes)


PARTS: dict[str, Part] = {
    "smoke": Part("benchmarks.gpu.smoke", "--device {device} --out {out}", minutes=2),
    "tests": Part("pytest", "tests/gpu -m gpu -q -p no:cacheprovider", None, minutes=2),
    "device-small": Part("benchmarks.device.run", f"{_DEVICE} {_SMALL}", f"{_DEVICE} {_SMALL} --quick", minutes=5),
    "device-large": Part("benchmarks.device.run", f"{_DEVICE} {_LARGE}", f"{_DEVICE} {_LARGE} --quick", minutes=6),
    "profile": Part(
        "benchmarks.gpu.profile", "--device {device} --out {out}", "--device cpu --out {out} --batches 1", minutes=1.5
    ),
    "serving-digits": Part(
        "benchmarks.gpu.serving",
        "digits --device {device} --out {out}",
        "digits --device cpu --out {out} --rounds 1 --seconds 0.5 --sweeps 0",
        minutes=5,
    ),
    "serving-photographs": Part(
        "benchmarks.gpu.serving",
        "photographs --device {device} --out {out}",
        "photographs --device cpu --out {out} --rounds 1 --seconds 0.5 --sweeps 0",
        minutes=5,
    ),
    "fit": Part(
        "benchmarks.gpu.fit",
        "--device {device} --out {out} --images 20000",
        "--device cpu --out {out} --images 200 --size 64",
        minutes=5,
    ),
    "fit-two": Part(
        "benchmarks.gpu.fit",
        "--device {device} --out {out} --images 4000 --processes 2",
        "--device cpu --out {out} --images 200 --size 64 --processes 2",
        minutes=3,
    ),
    "paper-resnet18": _paper("--only resnet18", 8),
    "paper-sn": _paper("--only sn", 8),
    "paper-vgg16": _paper("--only vgg16", 8),
    "paper-wrn": Part(
        "benchmarks.checkpoints",
        f"{_PAPER} --scale full --epochs 40 --network wide_resnet28_10 --training-data cifar10",
        f"{_REHEARSED} --epochs 1 --network wide_resnet10_1 --training-data cifar10",
        minutes=8,
    ),
}
"""In the order in which they are worth their time."""


def run(part: Part, name: str, device: str, out: Path, data: Path | None, minutes: float) -> Json:
    """Run one part to its end or its limit, and say how it went."""
    if device == "cpu" and part.rehearsal is None:
        return {"state": "skipped", "note": NEEDS_CUDA, "minutes": 0.0}
    if part.needs_data and data is None:
        return {"state": "skipped", "note": "needs --data", "minutes": 0.0}
    log, began = out / f"{name}-{device}.log", time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            part.command(device, out, data),
            stdout=stream,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,  # Ended with the servers and fits that it started.
        )
        try:
            state = "done" if process.wait(60 * minutes) == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "out of time"
        finally:
            _end(process)
    note = "" if state == "done" else _last_line(log)
    return {"state": state, "note": note, "minutes": round((time.monotonic() - began) / 60, 1)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End whatever is left of a part."""
    for number, seconds in ((signal.SIGTERM, GRACE_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(seconds)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:160] if lines else ""


def table(parts: Json) -> str:
    """How every part went."""
    rows = [[name, each["state"], f"{each['minutes']:.1f}", each["note"]] for name, each in parts.items()]
    return markdown_table(["part", "state", "minutes", "note or last line"], rows)


def main(argv: Sequence[str] | None = None) -> int:
    """Run parts; 1 if one failed."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cli.add_argument("--data", type=Path, metavar="ROOT", help="folder of the data sets")
    cli.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR")
    cli.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="limit of each part")
    cli.add_argument("--again", action="store_true", help="also run what ended well before")
    cli.add_argument("--list", action="store_true", help="only list the parts")
    args = cli.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        cli.error(f"no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    if args.list:
        for name, part in PARTS.items():
            print(f"{name}: about {part.minutes:g} minutes, {' '.join(part.command(args.device, args.out, args.data))}")
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    file = args.out / f"plan-{args.device}.json"
    done: Json = json.loads(file.read_text())["parts"] if file.exists() else {}
    for name in args.parts or PARTS:
        if done.get(name, {}).get("state") == "done" and not args.again:
            continue
        print(f"{name} …", flush=True)
        done[name] = run(PARTS[name], name, args.device, args.out, args.data, args.minutes)
        print(f"{name}: {done[name]['state']}, {done[name]['minutes']} minutes  {done[name]['note']}", flush=True)
        write_json(file, {"environment": environment(torch.device(args.device)), "parts": done})
    ordered = {name: done[name] for name in PARTS if name in done}
    print("\n" + table(ordered))
    return int(any(part["state"] == "failed" for part in ordered.values()))


if __name__ == "__main__":
    sys.exit(main())
