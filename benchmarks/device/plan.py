"""Run the measurements for a machine with a GPU, in parts of at most eight minutes, each with files of its own.

    python -m benchmarks.device.plan smoke tests                    # four minutes: every path once; run it first
    python -m benchmarks.device.plan device-small serving-digits    # any parts
    python -m benchmarks.device.plan --device cpu                   # a rehearsal of all parts, which times them

A part is a command with a time limit; its log is ``OUT/PART-DEVICE.log``, and its results lie beside it.  A part that
ran out of time continues where it stopped.  A rehearsal makes the same calls with fewer images and rounds.  Parts that
need the data sets are skipped without ``--data``.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.runs import plain_parser
from benchmarks.serving.running import Processes

LIMIT_MINUTES = 8.0


@dataclass(frozen=True)
class Part:
    command: str  # The module and its arguments, with placeholders ``{device}``, ``{out}`` and ``{data}``.
    rehearsal: str | None = ""  # Additional arguments on a CPU; None if only CUDA can run it.
    minutes: float = 5.0  # The expected minutes on a GPU, a guess until it was run.

    def words(self, device: str, out: Path, data: Path | None) -> list[str]:
        text = f"{self.command} {self.rehearsal}" if device == "cpu" else self.command
        return [sys.executable, "-m", *shlex.split(text.format(device=device, out=out, data=data))]


_TESTS = "pytest -m gpu -q -p no:cacheprovider tests/gpu"
_HERE = "--device {device} --out {out}"
_DEVICE = f"benchmarks.device.run {_HERE} --missing --only"
_PEERS = "benchmarks.serving.peers --installed --best-instructions --rounds 2 --sweeps 0 --load 0.7 --device {device}"
_FEWER = "--rounds 1 --seconds 0.5"
_PAPER = "--scale full --epochs 40 --device {device} --data {data}"
_FOLDERS = "--out {out}/paper --checkpoints {out}/checkpoints"
_CASE = f"benchmarks.paper.ddu_case_study {_PAPER} {_FOLDERS} --only"
_WRN = "benchmarks.train --network wide_resnet28_10 --data cifar10:{data} --schedule ddu --epochs 40"

PARTS: dict[str, Part] = {  # The parts, in the order of their worth for their time.
    "smoke": Part(f"{_TESTS}/test_service.py", None, minutes=1),
    "tests": Part(f"{_TESTS}/test_cuda.py", None, minutes=1),
    "agreement": Part(f"benchmarks.device.agreement {_HERE} --data {{data}}", minutes=1),
    "device-small": Part(
        f"{_DEVICE} tail 'ResNet-18, 28' 'ResNet-50, 32' 'VGG-16, 32' 'WRN-28-10, 32'", "--quick", minutes=2
    ),
    "device-large": Part(f"{_DEVICE} 'ResNet-18, 224' 'ResNet-50, 224' 'VGG-16, 224'", "--quick", minutes=2),
    "serving-photographs": Part(
        f"{_PEERS} --out {{out}}/serving-photographs --cases photographs --untrained torchvision:resnet50",
        f"{_FEWER} --untrained torchvision:resnet18",
        minutes=4,
    ),
    "large-fit": Part(
        f"benchmarks.device.large_fit {_HERE} --data {{data}}",
        "--network torchvision:resnet18 --images 100 --epochs 1",
        minutes=2,
    ),
    "serving-digits": Part(f"{_PEERS} --out {{out}}/serving-digits --cases compute-bound", _FEWER),
    "paper-resnet18": Part(f"{_CASE} resnet18", "--scale smoke --epochs 1", minutes=8),
    "paper-sn": Part(f"{_CASE} sn", "--scale smoke --epochs 1", minutes=8),
    "paper-vgg16": Part(f"{_CASE} vgg16", "--scale smoke --epochs 1", minutes=8),
    "paper-wrn": Part(
        f"{_WRN} --device {{device}} --out {{out}}/checkpoints/wide_resnet28_10.safetensors",
        "--epochs 1 --network wide_resnet10_1 --out {out}/checkpoints/rehearsal.safetensors",
        minutes=8,
    ),
}


def run(name: str, device: str, out: Path, data: Path | None, minutes: float) -> str:
    """Run one part to its end or its limit, and say how it went."""
    part, log, began = PARTS[name], out / f"{name}-{device}.log", time.monotonic()
    if device == "cpu" and part.rehearsal is None:
        return "skipped, needs CUDA"
    if "{data}" in part.command and data is None:
        return "skipped, needs --data"
    with Processes(part.words(device, out, data), {**os.environ, "PYTHONUNBUFFERED": "1"}, log) as processes:
        code = processes.wait(60 * minutes)
        state = "out of time" if code is None else "failed" if code else "done"
        last = processes.tail().rpartition("\n")[2]
    return f"{state}, {(time.monotonic() - began) / 60:.1f} minutes" + ("" if code == 0 else f": {last}")


def main(argv: Sequence[str] | None = None) -> int:
    cli = plain_parser(__doc__)
    cli.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    cli.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    cli.add_argument("--data", type=Path, metavar="ROOT", help="folder of the data sets")
    cli.add_argument("--out", type=Path, default=Path("out/gpu"), metavar="DIR")
    cli.add_argument("--minutes", type=float, default=LIMIT_MINUTES, help="limit of each part")
    args = cli.parse_args(argv)
    if unknown := set(args.parts) - set(PARTS):
        cli.error(f"no part {', '.join(sorted(unknown))}; expected {', '.join(PARTS)}")
    args.out.mkdir(parents=True, exist_ok=True)
    ended = {}
    for name in args.parts or PARTS:
        print(f"{name}, about {PARTS[name].minutes:g} minutes …", flush=True)
        ended[name] = run(name, args.device, args.out.resolve(), args.data and args.data.resolve(), args.minutes)
        print(f"{name}: {ended[name]}", flush=True)
    return int(any(how.startswith("failed") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
