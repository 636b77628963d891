"""Our service, LitServe, BentoML, Ray Serve, mosec and naive FastAPI, serving the same two bundles on this machine.

    python -m benchmarks.serving.peers --seconds 8
    python -m benchmarks.serving.peers --only mosec psc     # measured again, merged, and marked as merged
    python -m benchmarks.serving.peers --resume             # what an interrupted run has not done
    python -m benchmarks.serving.peers --report             # the plot and the section of README.md, from the JSON

Each peer is installed into ``out/peers/NAME`` when it is not there.  One load generator sends the requests from a
process of its own, pinned to no core.  A server is warmed up; then 64 clients send single images in a closed loop,
one client sends them (the unloaded latency), and they arrive at random at 70 % of the peak; where a request may
carry several images, four clients send 32 each.  Writes ``serving-peers.json``.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs import RESULTS, Json, environment, write_json
from benchmarks.serving import ceilings, environments
from benchmarks.serving.adapters.settings import COUNTS, FACTORY
from benchmarks.serving.drive import Phase, Target, drive
from benchmarks.serving.histogram import FIRST_MS, PER_DECADE
from benchmarks.serving.load import digits
from benchmarks.serving.overhead import make_bundle
from benchmarks.serving.peers_report import draw, targets, write_report
from benchmarks.serving.processes import ROOT, DidNotStart, Processes, free_port
from benchmarks.serving.servers import BY_NAME, COMPUTE, OVERHEAD, SERVERS, Server, answer_of
from psc_core.predictor import PSC

CLIENTS, STEADY, MANY, MANY_CLIENTS = 64, 0.7, 32, 4
WARM_UP_SECONDS = 1.5
FILE = "serving-peers.json"
ADAPTERS = "benchmarks.serving.adapters"
TOLERANCE = 1e-3
"""Peers decode with another library and batch otherwise; the same pixels and network agree far below this."""


class Apart:
    """Runs functions in a fresh process each, which is gone when the answer is there."""

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()


class Client:
    """The load generator's process, one for the whole run."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def send(self, processes: Processes, target: Target, phase: Phase, counts: Path) -> Json:
        """One phase, and what the server took for it."""
        cpu_s, steps, images = processes.cpu_s(), *counted(counts)
        found: Json = self._pool.submit(drive, target, phase).result()
        found["server_cpu_s"] = round(processes.cpu_s() - cpu_s, 3)
        found["memory_mib"] = processes.memory_mib()
        now_steps, now_images = counted(counts)
        if now_steps > steps:
            found["mean_batch"] = round((now_images - images) / (now_steps - steps), 2)
        return found


def counted(folder: Path) -> tuple[int, int]:
    """Steps and images of all processes of an adapter so far."""
    pairs = [COUNTS.unpack(file.read_bytes()) for file in folder.iterdir()]
    return sum(steps for steps, _ in pairs), sum(images for _, images in pairs)


def check_answer(server: Server, answer: Json, bundle: Path, image: bytes) -> None:
    """Refuse to compare a server that says something else than the library.

    Raises:
        DidNotStart: Another number than the library's.
    """
    expected = PSC.load(bundle, device="cpu", allow_factories=[FACTORY]).predict([image])
    pairs = [
        (answer["predictive_entropy"], float(expected.predictive_entropy[0])),
        (answer["log_density"], float(expected.log_density[0])),
        (answer["ood_p_value"], float(expected.ood_p_value[0])),
        *zip(answer["probabilities"], expected.probabilities[0].tolist(), strict=True),
    ]
    for got, wanted in pairs:
        if not math.isclose(got, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise DidNotStart(f"{server.label} answered {got}, the library says {wanted}")


class Metrics:
    """Mean batch size of one ``psc-serve`` process between two looks at its ``/metrics``."""

    def __init__(self, processes: Processes, port: int) -> None:
        self._read = lambda: processes.get(port, "/metrics")
        self._before = self._sums()

    def mean_batch(self) -> float | None:
        """Images a device step since the last call."""
        before, self._before = self._before, self._sums()
        steps, images = (after - last for after, last in zip(self._before, before, strict=True))
        return round(images / steps, 2) if steps else None

    def _sums(self) -> tuple[float, float]:
        found = {"count": 0.0, "sum": 0.0}
        for line in self._read().splitlines():
            name, _, value = line.partition(" ")
            if name in ("psc_batch_size_count", "psc_batch_size_sum"):
                found[name.rpartition("_")[2]] = float(value)
        return found["count"], found["sum"]


def measure(
    server: Server, network: str, bundle: Path, images: Sequence[bytes], seconds: float, client: Client
) -> Json:
    """All phases of one server on one network."""
    python = server.python()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        port, counts = free_port(), Path(scratch)
        command = server.command(python, port=port, bundle=bundle)
        variables = server.variables(network, port=port, bundle=bundle, counts=counts)
        target = server.target(port, images)
        with Processes(command, variables) as processes:
            body = processes.wait_until_it_answers(target)
            check_answer(server, answer_of(server, body), bundle, images[0])
            found: Json = {
                "versions": environments.versions(python, server.packages),
                "start_s": round(time.monotonic() - began, 1),
            }
            metrics = Metrics(processes, port) if server.name == "psc" else None

            def phase(name: str, target: Target, phase: Phase) -> None:
                found[name] = client.send(processes, target, phase, counts)
                if metrics is not None and (mean := metrics.mean_batch()) is not None:
                    found[name]["mean_batch"] = mean

            phase("warm-up", target, Phase(WARM_UP_SECONDS, clients=CLIENTS))
            phase("closed", target, Phase(seconds, clients=CLIENTS))
            phase("unloaded", target, Phase(max(1.0, seconds / 4), clients=1))
            rate = STEADY * found["closed"]["requests_per_s"]
            if rate:
                phase("steady", target, Phase(seconds, per_second=rate))
            many = server.target_of_many(port, images, MANY)
            if many is not None and network == COMPUTE:
                phase("warm-up", many, Phase(WARM_UP_SECONDS, clients=MANY_CLIENTS))
                phase("many", many, Phase(seconds, clients=MANY_CLIENTS))
            del found["warm-up"]
    return found


def measure_http(
    module: str, bundle: Path, answer: Path, images: Sequence[bytes], seconds: float, client: Client
) -> Json:
    """A closed loop against an adapter without a model."""
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        port = free_port()
        shell = Server(module, module, ("-m", f"{ADAPTERS}.{module}"), "")
        variables = shell.variables(OVERHEAD, port=port, bundle=bundle, counts=Path(scratch))
        variables["PSC_BENCH_ANSWER"] = str(answer)
        target = shell.target(port, images)
        with Processes(shell.command(Path(sys.executable), port=port, bundle=bundle), variables) as processes:
            processes.wait_until_it_answers(target)
            client.send(processes, target, Phase(WARM_UP_SECONDS, clients=CLIENTS), Path(scratch))
            return client.send(processes, target, Phase(seconds, clients=CLIENTS), Path(scratch))


class Run:
    """The record, written after every part, and what is still to be measured."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.file: Path = args.out / FILE
        self.seconds: float = args.seconds
        self._only: list[str] = args.only or []
        kept = json.loads(self.file.read_text()) if self.file.exists() and (args.resume or args.only) else None
        self.resumed = bool(args.resume and kept)
        self.id = kept["run"] if self.resumed else time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.record: Json = kept or {"run": self.id, "servers": {OVERHEAD: {}, COMPUTE: {}}, "bare": {}, "ceilings": {}}
        if not self._only:
            self.record |= {
                "command": f"python -m benchmarks.serving.peers --seconds {self.seconds:g}",
                "environment": environment(torch.device("cpu")),
                "note": args.note,
                "seconds": self.seconds,
                "clients": CLIENTS,
                "many": {"images": MANY, "clients": MANY_CLIENTS},
                "bins": {"first_ms": FIRST_MS, "per_decade": PER_DECADE},
                "settings": {server.name: server.settings for server in SERVERS},
            }

    def wants(self, network: str, name: str) -> bool:
        """Whether this server is to be measured now."""
        if self._only:
            return name in self._only
        return not (self.resumed and name in self.record["servers"][network])

    def part(self, kind: str, name: str, compute: Callable[[], Any]) -> None:
        """A part of the record that belongs to no server; left out when it fails."""
        if not self._only and not (self.resumed and name in self.record[kind]):
            print(f"{kind}: {name} ...", file=sys.stderr, flush=True)
            try:
                self.record[kind][name] = compute()
            except DidNotStart as error:
                print(f"  failed: {error}", file=sys.stderr, flush=True)
            self.write()

    def server(self, network: str, server: Server, compute: Callable[[], Json]) -> None:
        """A server's part; a failure is recorded with its reason."""
        if not self.wants(network, server.name):
            return
        print(f"{network}: {server.label} ...", file=sys.stderr, flush=True)
        try:
            found = compute()
        except (DidNotStart, RuntimeError, KeyError, ValueError) as error:
            found = {"failed": str(error).replace(str(ROOT), "")[:600]}
        self.record["servers"][network][server.name] = {**found, "run": self.id}
        print(f"  {_short(found)}", file=sys.stderr, flush=True)
        self.write()

    def write(self) -> None:
        """Keep what there is."""
        self.record["targets"] = targets(self.record)
        write_json(self.file, self.record)


def _short(found: Json) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}"
    return ", ".join(
        f"{name} {phase['images_per_s']:g}/s p50 {phase.get('p50_ms')} p99 {phase.get('p99_ms')} ms "
        f"batch {phase.get('mean_batch')} {phase['statuses']}"
        for name, phase in found.items()
        if isinstance(phase, dict) and "images_per_s" in phase
    )


def measure_all(run: Run, bundles: dict[str, Path]) -> None:
    """Everything that is wanted, the bare step of a network before and after its servers."""
    images, apart = digits(256), Apart()
    with Client() as client:
        for network, bundle in bundles.items():
            bare_steps(run, network, bundle, "before", apart)
            for server in SERVERS:
                run.server(network, server, partial(measure, server, network, bundle, images, run.seconds, client))
            bare_steps(run, network, bundle, "after", apart)
        tiny = bundles[OVERHEAD]
        answer = environments.HOME / "answer.json"
        answer.write_bytes(b'{"predictions":[' + b"0," * 350 + b"0]}")
        run.part("ceilings", "decode", partial(apart, ceilings.decode_only, tiny, images, 2.0))
        for module in ("bare", "instant"):
            run.part("ceilings", module, partial(measure_http, module, tiny, answer, images, run.seconds / 2, client))


def bare_steps(run: Run, network: str, bundle: Path, when: str, apart: Apart) -> None:
    """The device step alone, with the service's own number of threads; for the small network with one too."""
    for threads in (None, 1) if network == OVERHEAD else (None,):
        name = f"{network}, {when}" + ("" if threads is None else f", {threads} thread")
        run.part("bare", name, partial(apart, ceilings.bare_step, bundle, 3.0, threads))


def main() -> int:
    """Measure, or write the report of what was measured."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME", help="merge these into the results")
    cli.add_argument("--seconds", type=float, default=8.0, help="length of a phase")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--resume", action="store_true", help="go on with the run in --out")
    cli.add_argument("--build", action="store_true", help="only install the peers")
    cli.add_argument("--report", action="store_true", help="only write the plot and the section of README.md")
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    args = cli.parse_args()
    if args.report:
        write_report(json.loads((args.out / FILE).read_text()), args.out)
        return 0
    for server in SERVERS:
        if not args.only or server.name in args.only:
            print(f"{server.label}: {server.python()}", file=sys.stderr, flush=True)
    if args.build:
        return 0
    tiny = environments.HOME / OVERHEAD
    bundles = {
        OVERHEAD: tiny if (tiny / "manifest.json").exists() else make_bundle(tiny),
        COMPUTE: ROOT / "artifacts" / "dirty-mnist-resnet18",
    }
    args.out.mkdir(parents=True, exist_ok=True)
    run = Run(args)
    measure_all(run, bundles)
    draw(run.record, args.out)
    for target in run.record["targets"]:
        print(f"{'met    ' if target['met'] else 'NOT MET'}  {target['target']}: {target['measured']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
