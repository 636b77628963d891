"""Measure the cost of the prediction log: photographs of about 100 kB, to services with and without one in turn.

    python -m benchmarks.serving.log_cost --turns 8

The shipped bundle calls nearly every photograph out of distribution, so ``all`` stores each of them, which is the
highest cost of a log; ``tenth`` stores one in ten, ``rows`` none.  Each turn measures every service once, each time in
another order, and ratios are taken within a turn.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import sys
import tempfile
from typing import Final

from benchmarks.runs import BUNDLE, markdown_table
from benchmarks.serving.client import Generator, Target
from benchmarks.serving.images import photographs
from benchmarks.serving.processes import Processes, free_port, scraped

LOGS: Final = {"without": None, "rows": "", "tenth": "abstained:0.1", "all": "abstained"}
"""The name of each service, and its setting ``log_images``; None has no log."""

CLIENTS: Final = 16

_IMAGES: Final = 'psc_log_images_total{{result="{}"}}'


def main(argv: list[str] | None = None) -> int:
    """Measure the services and print the table."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--turns", type=int, default=8)
    cli.add_argument("--seconds", type=float, default=4.0, help="of a turn, for each service")
    cli.add_argument("--threads", type=int, default=1, help="of a service")
    args = cli.parse_args(argv)
    files = photographs(200)
    print(f"{len(files)} JPEG files, {statistics.mean(map(len, files)) / 1000:.0f} kB on average", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        targets = {name: Target(free_port(), "/predict", "image/jpeg", files) for name in LOGS}
        processes: dict[str, Processes] = {}
        for name, images in LOGS.items():
            words = ["--bundle", str(BUNDLE), "--port", str(targets[name].port), "--device", "cpu"]
            words += ["--log-level", "error", "--threads", str(args.threads)]
            if images is not None:
                words += ["--log", f"{folder}/{name}", "--log-images", images, "--log-audit", "0"]
            clean = {key: value for key, value in os.environ.items() if not key.startswith("PSC_")}
            processes[name] = stack.enter_context(Processes([sys.executable, "-m", "app.cli", *words], clean))
            processes[name].wait_until_ready(targets[name])
        print(asyncio.run(_measure(targets, processes, args.turns, args.seconds)))
    return 0


async def _measure(targets: dict[str, Target], processes: dict[str, Processes], turns: int, seconds: float) -> str:
    generators = {name: Generator(target) for name, target in targets.items()}
    rates, tails, costs = ({name: list[float]() for name in targets} for _ in range(3))
    for generator in generators.values():
        await generator.closed_loop(CLIENTS, 1.0)
    names = list(targets)
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            before = processes[name].cpu_s()
            load = await generators[name].closed_loop(CLIENTS, seconds)
            latencies = load.seconds()
            costs[name].append((processes[name].cpu_s() - before) / len(latencies))
            rates[name].append(len(latencies) / (load.ended - load.began))
            tails[name].append(latencies[int(0.99 * len(latencies))])
    rows = []
    for name, generator in generators.items():
        counted = scraped(await generator.get("/metrics"))
        stored = [f"{counted.get(_IMAGES.format(result), 0):.0f}" for result in ("written", "dropped")]
        ratios = [_ratio(each[name], each["without"]) for each in (rates, tails, costs)]
        rows.append([name, f"{statistics.median(rates[name]):.1f}", *ratios, *stored])
    return markdown_table(
        ["log", "images/s", "images/s ÷ without", "p99 ÷ without", "CPU an image ÷ without", "written", "dropped"], rows
    )


def _ratio(values: list[float], base: list[float]) -> str:
    ratios = [value / of for value, of in zip(values, base, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f}–{high:.3f})"


if __name__ == "__main__":
    sys.exit(main())
