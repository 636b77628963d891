"""Put the shipped bundle under load on the CPU: at its peak, at 70 % and 300 % of it, and afterwards.

    python -m benchmarks.serving.load

It starts ``psc-serve`` with its default settings in a process of its own, sends single images over HTTP, and writes
``serving-load.json``; the exit code is 1 if a requirement is not met.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from app.settings import Settings
from benchmarks.runs import BUNDLE, RESULTS, Json, markdown_table, measured, origin, plain_parser, write_json
from benchmarks.serving.client import Generator, Load, Target, summary
from benchmarks.serving.images import digits
from benchmarks.serving.processes import Processes, free_port, mean_batch, scraped

CLIENTS, STEADY, OVERLOAD = 64, 0.7, 3.0
LIGHT = 0.1
"""The fraction of the peak at which the service counts as unloaded."""

DEADLINE = float(Settings.model_fields["deadline_seconds"].default)
QUEUE = int(Settings.model_fields["max_queue_images"].default)
RECOVER_SECONDS = 5.0
NORMAL = 2.0
"""Latency is normal while a second's median is at most this many times the unloaded median."""

PHASES = ("closed loop", "unloaded", "steady", "overload", "recovery")
"""The phases, in the order in which they run."""


async def run(name: str, generator: Generator, sending: Coroutine[Any, Any, Load]) -> Json:
    """Run a phase and return its result, with queue and batches from the service's metrics."""

    async def metrics() -> dict[str, float]:
        return scraped(await generator.get("/metrics"))

    before, deepest = await metrics(), 0.0
    task = asyncio.create_task(sending)
    while not task.done():
        await asyncio.wait([task], timeout=0.25)
        deepest = max(deepest, (await metrics())["psc_queue_depth"])
    batches = {"mean_size": mean_batch(before, await metrics())}
    found = {**phase(task.result()), "batches": batches, "max_queued_images": int(deepest)}
    print(f"{name}: {found}", file=sys.stderr, flush=True)
    return found


def phase(load: Load) -> Json:
    """Return the result of a phase as the client sees it."""
    without = sum(response.status == 429 and response.retry_after is None for response in load.responses)
    sent_per_s = round(len(load.responses) / (load.ended - load.began), 1)
    return {"sent_per_s": sent_per_s, "rejections_without_retry_after": without, **summary(load)}


async def measure(target: Target, scale: float) -> tuple[dict[str, Json], Json]:
    """Run all phases; ``scale`` multiplies their lengths."""
    generator, phases = Generator(target), dict[str, Json]()

    async def send(name: str, sending: Coroutine[Any, Any, Load]) -> None:
        phases[name] = await run(name, generator, sending)

    await generator.closed_loop(CLIENTS, 2.0)
    await send("closed loop", generator.closed_loop(CLIENTS, 15.0 * scale))
    peak = phases["closed loop"]["requests_per_s"]
    light = max(5.0, LIGHT * peak)
    await asyncio.sleep(1.0)
    await send("unloaded", generator.open_loop(light, 10.0 * scale))
    await send("steady", generator.open_loop(STEADY * peak, 20.0 * scale))
    sent = asyncio.Event()
    task = asyncio.create_task(send("overload", generator.open_loop(OVERLOAD * peak, 60.0 * scale, sent=sent)))
    await sent.wait()  # The light load begins while the queue of the overload is still full.
    recovery = await generator.open_loop(light, 12.0)
    await task
    phases["recovery"] = phase(recovery)
    generator.close()
    normal_s = phases["unloaded"]["p50_ms"] / 1000
    return phases, {"peak_images_per_s": peak, "back_to_normal_s": back_to_normal(recovery, normal_s)}


def back_to_normal(load: Load, normal_s: float) -> float:
    """Return the seconds from the start of ``load`` until every second has a normal median and no rejection."""
    good_since = 0
    for second in range(int(load.ended - load.began)):
        window = [response for response in load.responses if second <= response.due - load.began < second + 1]
        fine = [response.seconds for response in window if response.status == 200]
        if len(fine) < len(window) or (fine and statistics.median(fine) > NORMAL * normal_s):
            good_since = second + 1
    return float(good_since)


def requirements(phases: dict[str, Json], found: Json) -> list[Json]:
    """Return the requirements, and whether they are met."""
    closed, steady, over = phases["closed loop"], phases["steady"], phases["overload"]
    queued = max(phase.get("max_queued_images", 0) for phase in phases.values())
    sizes = [phases[name]["batches"]["mean_size"] for name in ("unloaded", "steady", "closed loop", "overload")]
    without, p99_s = over["rejections_without_retry_after"], over.get("p99_ms", math.inf) / 1000
    back_s = found["back_to_normal_s"]
    checks = {
        "closed loop and 70 % of the peak: every response is 200": (
            set(closed["statuses"]) == set(steady["statuses"]) == {"200"},
            f"{_counts(closed)}; {_counts(steady)}",
        ),
        "batch sizes follow the load": (
            sizes[0] < sizes[1] < sizes[2] <= sizes[3] * 1.05,
            "mean " + " → ".join(map(str, sizes)),
        ),
        "overload: only 200 and 429": (set(over["statuses"]) == {"200", "429"}, _counts(over)),
        "overload: every 429 has Retry-After": (without == 0, f"{without} without"),
        f"overload: p99 of the accepted within the deadline of {DEADLINE:g} s": (p99_s <= DEADLINE, f"{p99_s:.2f} s"),
        f"the queue never holds more than {QUEUE} images": (queued <= QUEUE, f"at most {queued}"),
        f"normal latency within {RECOVER_SECONDS:g} s of the overload's end": (
            back_s <= RECOVER_SECONDS,
            f"{back_s:g} s",
        ),
    }
    return [{"requirement": what, "met": met, "found": value} for what, (met, value) in checks.items()]


def _counts(phase: Json) -> str:
    return ", ".join(f"{count:,} × {status}" for status, count in phase["statuses"].items())


def fragment(record: Json) -> str:
    """Return tables of every phase and of the requirements."""
    rows = []
    for name in PHASES:
        phase = record["phases"][name]
        rows.append(
            [
                name,
                f"{phase['sent_per_s']:.0f}",
                f"{phase['requests_per_s']:.0f}",
                *(f"{phase['statuses'].get(status, 0):,}" for status in ("200", "429")),
                *(f"{phase[key]:,.1f} ms" if key in phase else "" for key in ("p50_ms", "p99_ms")),
                str(phase.get("batches", {}).get("mean_size", "")),
                str(phase.get("max_queued_images", "")),
            ]
        )
    header = ["phase", "sent/s", "answered/s", "200", "429", "p50", "p99", "mean batch", "maximum queued"]
    checks = [
        [each["requirement"], each["found"], "yes" if each["met"] else "**no**"] for each in record["requirements"]
    ]
    tables = markdown_table(header, rows), markdown_table(["requirement", "found", "met"], checks)
    return "\n\n".join([measured(record), *tables])


def main(argv: list[str] | None = None) -> int:
    """Measure, write and print; return 1 if a requirement is not met."""
    cli = plain_parser(__doc__)
    cli.add_argument("--scale", type=float, help="multiplies the lengths of the phases")
    cli.add_argument("--out", type=Path, default=RESULTS)
    args = cli.parse_args(argv)
    target = Target(free_port(), "/predict", "image/png", digits(256))
    words = ["--bundle", str(BUNDLE), "--port", str(target.port), "--device", "cpu", "--log-level", "error"]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
    with Processes([sys.executable, "-m", "app.cli", *words], clean) as processes:
        processes.wait_until_ready(target)
        phases, found = asyncio.run(measure(target, args.scale or 1.0))
    record = {
        **origin(args, torch.device("cpu")),
        "bundle": BUNDLE.name,
        "clients": CLIENTS,
        "phases": phases,
        "requirements": requirements(phases, found),
        **found,
    }
    write_json(args.out / "serving-load.json", record)
    print(fragment(record))
    return 0 if all(each["met"] for each in record["requirements"]) else 1


if __name__ == "__main__":
    sys.exit(main())
