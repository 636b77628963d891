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
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from benchmarks.runs import RESULTS, Json, environment, write_json, write_section
from benchmarks.serving.client import Generator, Load
from benchmarks.serving.report import back_to_normal, batches, requirements, section, summary
from psc_core.data import open_dataset
from psc_core.preprocess import PRESETS

ROOT = Path(__file__).resolve().parents[2]
CLIENTS, STEADY, OVERLOAD = 64, 0.7, 3.0
LIGHT = 0.1
"""Share of the peak at which the service counts as unloaded."""


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
    sent = asyncio.Event()
    overload = bench.run("overload", generator.open_loop(OVERLOAD * peak, 60.0 * scale, sent=sent))
    task = asyncio.create_task(overload)
    await sent.wait()  # What is queued now is still to be answered while the light load begins.
    recovery = await generator.open_loop(light, 12.0)
    await task
    bench.phases["recovery"] = summary(recovery)
    generator.close()
    normal_s = bench.phases["unloaded"]["p50_ms"] / 1000
    return bench.phases, {"peak_images_per_s": peak, "back_to_normal_s": back_to_normal(recovery, normal_s)}


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
    write_section(args.out, "serving-load", section(report), "Serving under load")
    for check in checks:
        print(f"{'met    ' if check['met'] else 'NOT MET'}  {check['requirement']}: {check['found']}")
    return 0 if all(check["met"] for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
