"""The shipped bundle under load on the CPU: peak, 70 % of it, three times it, and how it recovers.

    python -m benchmarks.serving.load

Starts ``psc-serve`` with its default settings in a process of its own and sends single images over HTTP.
Writes ``serving-load.json`` and a section of ``serving.md``; the exit code is 1 if a requirement is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import BUNDLE, RESULTS, Json, environment, write_json, write_section
from benchmarks.serving.client import Generator, Load
from benchmarks.serving.drive import Target, summary
from benchmarks.serving.images import digits
from benchmarks.serving.processes import Processes, free_port
from benchmarks.serving.report import back_to_normal, batches, requirements, scraped, section

CLIENTS, STEADY, OVERLOAD = 64, 0.7, 3.0
LIGHT = 0.1
"""Fraction of the peak at which the service counts as unloaded."""


def start(bundle: Path, target: Target) -> Processes:
    """``psc-serve`` with its default settings on the CPU, whatever the environment sets."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
    words = ["--bundle", str(bundle), "--port", str(target.port), "--device", "cpu", "--log-level", "error"]
    return Processes([sys.executable, "-m", "app.cli", *words], clean)


class Bench:
    """Runs phases against a service and keeps their results."""

    def __init__(self, processes: Processes, generator: Generator) -> None:
        self._processes, self._generator = processes, generator
        self.phases: dict[str, Json] = {}

    async def run(self, name: str, sending: Coroutine[Any, Any, Load]) -> Load:
        """Run one phase and record its load, with queue and batches from the service's metrics."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        before, deepest = await self._metrics(), 0.0
        task = asyncio.create_task(sending)
        while not task.done():
            await asyncio.wait([task], timeout=0.25)
            deepest = max(deepest, (await self._metrics())["psc_queue_depth"])
        load, after = task.result(), await self._metrics()
        self.phases[name] = {
            **phase(load),
            "batches": batches(before, after),
            "max_queued_images": int(deepest),
            "memory_mib": self._processes.memory_mib(),
        }
        print(f"  {self.phases[name]}", file=sys.stderr, flush=True)
        return load

    async def _metrics(self) -> dict[str, float]:
        _, text = await self._generator.get("/metrics")
        return scraped(text)


def phase(load: Load) -> Json:
    """Result of a phase as the client sees it."""
    without = sum(response.status == 429 and response.retry_after is None for response in load.responses)
    sent_per_s = round(len(load.responses) / (load.ended - load.began), 1)
    return {"sent_per_s": sent_per_s, "rejections_without_retry_after": without, **summary(load)}


async def measure(processes: Processes, target: Target, scale: float) -> tuple[dict[str, Json], Json]:
    """All phases; their lengths are multiplied by ``scale``."""
    generator = Generator("127.0.0.1", target.port, target.bodies)
    bench = Bench(processes, generator)
    await generator.closed_loop(CLIENTS, 2.0)
    await bench.run("closed loop", generator.closed_loop(CLIENTS, 15.0 * scale))
    peak = bench.phases["closed loop"]["requests_per_s"]
    light = max(5.0, LIGHT * peak)
    await asyncio.sleep(1.0)
    await bench.run("unloaded", generator.open_loop(light, 10.0 * scale))
    await bench.run("steady", generator.open_loop(STEADY * peak, 20.0 * scale))
    sent = asyncio.Event()
    overload = bench.run("overload", generator.open_loop(OVERLOAD * peak, 60.0 * scale, sent=sent))
    task = asyncio.create_task(overload)
    await sent.wait()  # What is queued now is still to be answered while the light load begins.
    recovery = await generator.open_loop(light, 12.0)
    await task
    bench.phases["recovery"] = phase(recovery)
    generator.close()
    normal_s = bench.phases["unloaded"]["p50_ms"] / 1000
    return bench.phases, {"peak_images_per_s": peak, "back_to_normal_s": back_to_normal(recovery, normal_s)}


def main() -> int:
    """Measure, print and write; returns 1 if a requirement is not met."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--bundle", type=Path, default=BUNDLE)
    cli.add_argument("--scale", type=float, default=1.0, help="multiplies the lengths of the phases")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    args = cli.parse_args()
    target = Target(free_port(), "/predict", "image/png", digits(256))
    with start(args.bundle, target) as processes:
        processes.wait_until_ready(target)
        phases, found = asyncio.run(measure(processes, target, args.scale))
    checks = requirements(phases, found)
    report: Json = {
        "bundle": args.bundle.name,
        "clients": CLIENTS,
        "note": args.note,
        "command": "python -m benchmarks.serving.load",
        "environment": environment(torch.device("cpu")),
        "phases": phases,
        "requirements": checks,
        **found,
    }
    write_json(args.out / "serving-load.json", report)
    write_section(args.out / "serving.md", "serving-load", section(report), "Serving under load")
    for check in checks:
        print(f"{'met    ' if check['met'] else 'NOT MET'}  {check['requirement']}: {check['found']}")
    return 0 if all(check["met"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
