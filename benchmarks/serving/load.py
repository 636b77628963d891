"""The shipped bundle under load on the CPU: peak, 70 % of it, three times it, and how it recovers.

    python -m benchmarks.serving.load

Starts ``psc-serve`` with its default settings in a process of its own and sends single images over HTTP.
Writes ``serving-load.json`` and a section of ``README.md`` next to the other results; ends with code 1 when a
requirement is not met.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from app.settings import Settings
from benchmarks.runs import RESULTS, Json, environment, markdown_table, write_json
from benchmarks.serving.client import Generator, Load
from psc_core.data import open_dataset
from psc_core.preprocess import PRESETS

ROOT = Path(__file__).resolve().parents[2]
TITLE, MARKERS = "Serving under load", ("<!-- serving-load -->", "<!-- /serving-load -->")
DEADLINE = float(Settings.model_fields["deadline_seconds"].default)
QUEUE = int(Settings.model_fields["max_queue_images"].default)
CLIENTS, STEADY, OVERLOAD, RECOVER_SECONDS = 64, 0.7, 3.0, 5.0
LIGHT = 0.1
"""Share of the peak at which the service counts as unloaded."""
NORMAL = 2.0
"""Latency is back to normal when a second's median is at most this many times the unloaded median."""


def digits(count: int) -> list[bytes]:
    """Real digits as PNG files."""
    data = open_dataset(f"mnist:{ROOT / 'tests' / 'data'}", split="test", preprocess=PRESETS["mnist"])
    files = []
    for index in range(min(count, len(data))):
        buffer = io.BytesIO()
        Image.fromarray(data.image(index)[0]).save(buffer, "PNG")
        files.append(buffer.getvalue())
    return files


class Service:
    """``psc-serve`` with a bundle, on the CPU, in a process of its own, for as long as the ``with`` lasts."""

    def __init__(self, bundle: Path) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PSC_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "app.cli", "--bundle", str(bundle), "--port=0", "--device=cpu", "--log-level=error"],
            cwd=ROOT,
            env=clean,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._process.stderr is not None
        line = self._process.stderr.readline()
        if "listening on" not in line:
            raise SystemExit(f"expected psc-serve to listen, got {line!r}; run it by hand to see why")
        self.port = int(line.rsplit(":", 1)[1])

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def memory_mib(self) -> int:
        """Resident memory now."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * resource.getpagesize() >> 20


class Bench:
    """Runs phases against a service and keeps what each one showed."""

    def __init__(self, service: Service, generator: Generator) -> None:
        self._service, self._generator = service, generator
        self.phases: dict[str, Json] = {}

    async def ready(self) -> None:
        """Wait until the models are loaded and warm."""
        end = time.monotonic() + 120
        while (await self._generator.get("/readyz"))[0] != 200:
            if time.monotonic() > end:
                raise SystemExit("expected psc-serve to be ready within 120 s; run it by hand to see why")
            await asyncio.sleep(0.1)

    async def run(self, name: str, sending: Coroutine[Any, Any, Load]) -> Load:
        """One phase: its load, and meanwhile the service's own view of the queue and the batches."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        before, deepest = await self._metrics(), 0.0
        task = asyncio.create_task(sending)
        while not task.done():
            await asyncio.wait([task], timeout=0.25)
            deepest = max(deepest, (await self._metrics())["psc_queue_depth"])
        load, after = task.result(), await self._metrics()
        self.phases[name] = {
            **summary(load),
            "batches": batches(before, after),
            "most_queued_images": int(deepest),
            "memory_mib": self._service.memory_mib,
        }
        print(f"  {self.phases[name]}", file=sys.stderr, flush=True)
        return load

    async def _metrics(self) -> dict[str, float]:
        _, text = await self._generator.get("/metrics")
        return {name: float(value) for name, value in re.findall(r"^(psc_\S+) (\S+)$", text, re.MULTILINE)}


def batches(before: dict[str, float], after: dict[str, float]) -> Json:
    """Device steps between two scrapes: how many, their mean size, and the share of each size."""
    grown = {key: after[key] - before.get(key, 0.0) for key in after if key.startswith("psc_batch_size")}
    steps = grown["psc_batch_size_count"]
    shares, below = {}, 0.0
    for key, count in grown.items():
        if bound := re.fullmatch(r'psc_batch_size_bucket{le="(\d+)\.0"}', key):
            if count > below:
                shares[bound[1]] = round((count - below) / steps, 3)
            below = count
    return {
        "steps": int(steps),
        "mean_size": round(grown["psc_batch_size_sum"] / max(1.0, steps), 1),
        "share_by_size_up_to": shares,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """Of ascending values; infinite when there are none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("inf")


def summary(load: Load) -> Json:
    """Rates, statuses and latencies of a phase."""
    seconds = load.seconds()
    return {
        "seconds": round(load.ended - load.began, 1),
        "sent_per_s": round(len(load.answers) / (load.ended - load.began), 1),
        "answered_per_s": round(len(seconds) / max(load.ended - load.began, _span(load)), 1),
        "statuses": dict(sorted(load.statuses.items())),
        "refusals_without_retry_after": sum(
            answer.status == 429 and answer.retry_after is None for answer in load.answers
        ),
        "p50_ms": round(1000 * quantile(seconds, 0.5), 1) if seconds else None,
        "p99_ms": round(1000 * quantile(seconds, 0.99), 1) if seconds else None,
    }


def _span(load: Load) -> float:
    return max((answer.due + answer.seconds for answer in load.answers), default=load.began) - load.began


def back_to_normal(load: Load, normal_s: float) -> float:
    """Seconds from the start of ``load`` after which every second has a normal median and no refusal."""
    good_since = 0
    for second in range(int(load.ended - load.began)):
        window = [answer for answer in load.answers if second <= answer.due - load.began < second + 1]
        fine = [answer.seconds for answer in window if answer.status == 200]
        if len(fine) < len(window) or (fine and statistics.median(fine) > NORMAL * normal_s):
            good_since = second + 1
    return float(good_since)


async def measure(service: Service, scale: float) -> tuple[dict[str, Json], Json]:
    """All phases; their lengths are multiplied by ``scale``."""
    generator = Generator("127.0.0.1", service.port, digits(256))
    bench = Bench(service, generator)
    await bench.ready()
    await generator.closed_loop(CLIENTS, 2.0)
    await bench.run("closed loop", generator.closed_loop(CLIENTS, 15.0 * scale))
    peak = bench.phases["closed loop"]["answered_per_s"]
    light = max(5.0, LIGHT * peak)
    await asyncio.sleep(1.0)
    await bench.run("unloaded", generator.open_loop(light, 10.0 * scale))
    await bench.run("steady", generator.open_loop(STEADY * peak, 20.0 * scale))
    overload = bench.run("overload", generator.open_loop(OVERLOAD * peak, 60.0 * scale))
    task = asyncio.create_task(overload)
    await asyncio.sleep(60.0 * scale + 0.5)
    # Arrivals have stopped; what is still queued is answered while the light load has begun.
    recovery = await generator.open_loop(light, 12.0)
    await task
    bench.phases["recovery"] = summary(recovery)
    generator.close()
    normal_s = bench.phases["unloaded"]["p50_ms"] / 1000
    return bench.phases, {"peak_images_per_s": peak, "back_to_normal_s": back_to_normal(recovery, normal_s)}


def requirements(phases: dict[str, Json], found: Json) -> list[Json]:
    """What must hold, and whether it does."""
    closed, steady, over = phases["closed loop"], phases["steady"], phases["overload"]
    queued = max(phase.get("most_queued_images", 0) for phase in phases.values())
    sizes = [phases[name]["batches"]["mean_size"] for name in ("unloaded", "steady", "closed loop", "overload")]
    checks = [
        (
            "closed loop and 70 % of the peak: every answer is 200",
            set(closed["statuses"]) == set(steady["statuses"]) == {"200"},
            f"{closed['statuses']}, {steady['statuses']}",
        ),
        (
            "batch sizes follow the load",
            sizes[0] < sizes[1] < sizes[2] <= sizes[3] * 1.05,
            "mean " + " → ".join(map(str, sizes)),
        ),
        ("overload: only 200 and 429", set(over["statuses"]) == {"200", "429"}, str(over["statuses"])),
        (
            "overload: every 429 has Retry-After",
            over["refusals_without_retry_after"] == 0,
            f"{over['refusals_without_retry_after']} without",
        ),
        (
            f"overload: p99 of the accepted within the deadline of {DEADLINE:g} s",
            over["p99_ms"] is not None and over["p99_ms"] <= 1000 * DEADLINE,
            f"{(over['p99_ms'] or 0) / 1000:.2f} s",
        ),
        (f"the queue never holds more than {QUEUE} images", queued <= QUEUE, f"at most {queued}"),
        (
            f"normal latency within {RECOVER_SECONDS:g} s of the overload's end",
            found["back_to_normal_s"] <= RECOVER_SECONDS,
            f"{found['back_to_normal_s']:g} s",
        ),
    ]
    return [{"requirement": what, "met": met, "found": value} for what, met, value in checks]


def section(report: Json) -> str:
    """The report as Markdown."""
    where = report["environment"]
    header = ["phase", "sent/s", "answered/s", "200", "429", "p50", "p99", "mean batch", "most queued"]
    rows = []
    for name, phase in report["phases"].items():
        numbers = [
            f"{phase['sent_per_s']:.0f}",
            f"{phase['answered_per_s']:.0f}",
            *(str(phase["statuses"].get(status, 0)) for status in ("200", "429")),
            f"{phase['p50_ms']:.1f} ms",
            f"{phase['p99_ms']:.1f} ms",
            str(phase.get("batches", {}).get("mean_size", "")),
            str(phase.get("most_queued_images", "")),
        ]
        rows.append([name, *numbers])
    checks = [
        [check["requirement"], check["found"], "yes" if check["met"] else "**no**"] for check in report["requirements"]
    ]
    return "\n".join(
        [
            f"{where['device']}, {where['cpus']} cores, torch {where['torch']}, Python {where['python']}, "
            f"{where['threads']} threads, psc {where['psc']} ({where['commit']}), {where['date']}; "
            f"{report['bundle']}, default settings, one PNG digit a request.  Client and server share the "
            f"{where['cpus']} cores, so the client takes its part of them from the service.  Latencies count from "
            "the moment a request was due.",
            *([report["note"]] if report["note"] else []),
            "",
            f"    {report['command']}",
            "",
            markdown_table(header, rows),
            "",
            f"Peak: {report['peak_images_per_s']:.0f} images/s with {CLIENTS} clients.  After the overload latency was "
            f"back to normal in {report['back_to_normal_s']:g} s.",
            "",
            markdown_table(["requirement", "found", "met"], checks),
        ]
    )


def write_section(file: Path, body: str) -> None:
    """Put ``body`` between the markers of a Markdown file; the rest of it stays."""
    text = file.read_text() if file.exists() else "# Results\n"
    first, last = MARKERS
    block = f"{first}\n{body}\n{last}"
    head, found, rest = text.partition(first)
    if found:
        file.write_text(head + block + rest.partition(last)[2])
    else:
        file.write_text(f"{text.rstrip()}\n\n## {TITLE}\n\n{block}\n")


def main() -> int:
    """Measure, print and write; 1 when a requirement is not met."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--bundle", type=Path, default=ROOT / "artifacts" / "dirty-mnist-resnet18")
    cli.add_argument("--scale", type=float, default=1.0, help="multiplies the lengths of the phases")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    args = cli.parse_args()
    with Service(args.bundle) as service:
        phases, found = asyncio.run(measure(service, args.scale))
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
    write_section(args.out / "README.md", section(report))
    for check in checks:
        print(f"{'met    ' if check['met'] else 'NOT MET'}  {check['requirement']}: {check['found']}")
    return 0 if all(check["met"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
