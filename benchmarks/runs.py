"""The frame of all benchmarks: their command line, resumable parts, results and provenance.

A run of a script with a scale writes ``NAME-SCALE.json`` and its figures into ``--out``.  The record holds parts (one
network, one seed, …), each with its result, settings, environment and command.  A part is saved in ``--out``/parts as
it finishes, so that an interrupted run continues and a long one can be split over several machines: a run takes the
parts of the record, and in their place those of the folder.  ``python -m benchmarks.report`` makes the result pages.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.data import ROOT_VARIABLE
from benchmarks.instruction_sets import cpu_flags
from psc_core import __version__
from psc_core.compute import resolve_device

SCALES = ("smoke", "cpu", "full")  # Seconds; hours on a few CPU cores; the paper's networks on a GPU.

ROOT = Path(__file__).resolve().parents[1]  # The root of the repository.

RESULTS = Path(__file__).parent / "results"  # The folder of published results.

BUNDLE = ROOT / "artifacts" / "dirty-mnist-resnet18"  # The shipped bundle.

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    name: str  # The name of the script, with which its files begin.
    scale: str  # One of :data:`SCALES`.
    data: Path  # The folder of the data sets.
    out: Path  # The folder of the results.
    checkpoints: Path  # The folder of trained networks and fitted stages, which all scripts share.
    seed: int
    device: torch.device
    command: str
    epochs: int | None = None  # The number of epochs of every network; None for the scale's.
    fit_images: int | None = None  # The number of training images to fit on; None for the scale's.
    test_images: int | None = None  # The number of images to test on; None for the scale's.

    def spec(self, name: str) -> str:
        """Return the spec of a built-in data set or of a factory of :mod:`benchmarks.data`."""
        return name if ":" in name else f"{name}:{self.data}"

    def part(self, name: str, settings: Mapping[str, Any], compute: Callable[[], Json]) -> Json:
        """Return ``compute()``, or the result of an earlier run with equal settings, data, epochs and counts."""
        numbers = {"epochs": self.epochs, "fit_images": self.fit_images, "test_images": self.test_images}
        settings = {**settings, **numbers, "data_digest": data_digest(self.data)}
        key = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
        kept = self._parts().get(name)
        if kept is not None and kept["key"] == key:
            return dict(kept["result"])
        result = compute()
        origin = {"command": self.command, "environment": environment(self.device)}
        part = {"key": key, "settings": settings, **origin, "result": result}
        write_json(self.out / "parts" / f"{self.name}-{self.scale}-{name}.json", part)
        return result

    def record(self) -> Json:
        """Return all parts at this scale, including those of earlier runs."""
        return {"name": self.name, "scale": self.scale, "parts": self._parts()}

    def _parts(self) -> dict[str, Json]:
        file = self._file()
        parts: dict[str, Json] = json.loads(file.read_text())["parts"] if file.exists() else {}
        first = f"{self.name}-{self.scale}-"
        for each in (self.out / "parts").glob(f"{first}*.json"):
            parts[each.stem.removeprefix(first)] = json.loads(each.read_text())
        return dict(sorted(parts.items()))

    def _file(self) -> Path:
        return self.out / f"{self.name}-{self.scale}.json"

    def figure(self, name: str) -> Path:
        self.out.mkdir(parents=True, exist_ok=True)
        return self.out / f"{self.name}-{self.scale}-{name}.svg"

    def write(self, fragment: Callable[[Json], str]) -> Json:
        """Write the record, print its Markdown, and return it."""
        record = self.record()
        write_json(self._file(), record)
        print(fragment(record))
        return record


@cache
def data_digest(root: Path) -> str:
    """Return the SHA-256 of the files of all data sets in a folder; to open one set takes longer."""
    files = sorted(file for name in ("*MNIST/raw/*", "cifar10-*.tar.gz") for file in root.glob(name))
    found = [(file.relative_to(root).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()) for file in files]
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()


def results(record: Json) -> dict[str, Json]:
    return {name: part["result"] for name, part in record["parts"].items()}


def parser(description: str | None) -> argparse.ArgumentParser:
    cli = plain_parser(description)
    cli.add_argument("--scale", choices=SCALES, default="cpu", help="smoke: seconds; cpu: hours; full: a GPU")
    cli.add_argument("--data", type=Path, required=True, metavar="ROOT", help="folder of the data sets")
    cli.add_argument("--out", type=Path, metavar="DIR", help="results (default: benchmarks/results, smoke: out/smoke)")
    cli.add_argument("--checkpoints", type=Path, metavar="DIR", help="trained networks (default: out/checkpoints)")
    cli.add_argument("--seed", type=int, default=0)
    cli.add_argument("--device", default="auto")
    cli.add_argument("--epochs", type=int, metavar="N", help="epochs of every network, instead of the scale's")
    cli.add_argument("--fit-images", type=int, metavar="N", help="fit on at most N images, instead of the scale's")
    cli.add_argument("--test-images", type=int, metavar="N", help="test on at most N images of each data set")
    return cli


def plain_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser that shows a module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def start(name: str, args: argparse.Namespace) -> Run:
    """Return the run of parsed options, and export the data folder for the factories of :mod:`benchmarks.data`."""
    os.environ[ROOT_VARIABLE] = str(args.data)
    smoke = args.scale == "smoke"
    out = args.out or (Path("out/smoke") if smoke else RESULTS)
    return Run(
        name=name,
        scale=args.scale,
        data=args.data,
        out=out,
        checkpoints=args.checkpoints or (out if smoke else Path("out")) / "checkpoints",
        seed=args.seed,
        device=resolve_device(args.device),
        command=command_line(args),
        epochs=args.epochs,
        fit_images=args.fit_images,
        test_images=args.test_images,
    )


_LOCAL = ("out", "checkpoints", "device")  # The options that change where a run happens, not what it measures.


def command_line(args: argparse.Namespace) -> str:
    """Return the command with the same options, without folders of this machine."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    words = [f"python -m {spec.name}" if spec is not None else Path(sys.argv[0]).name]
    for name, value in vars(args).items():
        if value is None or value is False or name in _LOCAL:
            continue
        given = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name.replace('_', '-')}", *("ROOT" if name == "data" else shlex.quote(str(x)) for x in given)]
    return " ".join(words)


def origin(args: argparse.Namespace, device: torch.device) -> Json:
    return {"command": command_line(args), "environment": environment(device)}


def environment(device: torch.device) -> Json:
    """Return the hardware and software, without names or paths of the machine."""
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "psc": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "cpus": os.cpu_count(),
        "cpu_flags": cpu_flags(),
        "threads": torch.get_num_threads(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_json(file: Path, data: Json) -> None:
    """Write a file atomically, so that an interrupted run leaves no half-written file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n")
    part.rename(file)


# -- Markdown -------------------------------------------------------------------------------------------------


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a pipe table whose first column is left-aligned."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def number(value: float | None, digits: int = 3) -> str:
    """Format a number for a table; a dash for None."""
    return "—" if value is None else f"{value:.{digits}f}"


def plus_minus(values: Sequence[float], digits: int = 4) -> str:
    """Return mean ± standard error; the mean alone of a single value."""
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean} ± {standard_error(values):.{digits}f}" if len(values) > 1 else mean


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean; NaN for a single value."""
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def where(environment: Json) -> str:
    return (
        f"{environment['device']}, {environment['cpus']} CPUs, {environment['threads']} threads, torch "
        f"{environment['torch']}, Python {environment['python']}, psc {environment['psc']} ({environment['commit']}), "
        f"{environment['date']}"
    )


def measured(record: Json) -> str:
    """Return the lines above the tables of a record without parts: environment and command."""
    return f"{where(record['environment'])}.\n\n    {record['command']}"


def provenance(record: Json) -> str:
    """Return the lines under a table: its scale, and the command and environment of each part."""
    together: dict[str, list[str]] = {}
    for name, part in record["parts"].items():
        together.setdefault(f"`{part['command']}` · {where(part['environment'])}", []).append(name)
    lines = [f"- {', '.join(names)}: {how}" for how, names in together.items()]
    return "\n".join([f"Measured at scale {record['scale']}:", "", *lines])
