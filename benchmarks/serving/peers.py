"""psc-serve, LitServe, BentoML, Ray Serve, mosec and naive FastAPI, serving the same two bundles on this machine.

    python -m benchmarks.serving.peers --seconds 2 --rounds 5
    python -m benchmarks.serving.peers --only psc fastapi --device cuda
    python -m benchmarks.serving.peers --report             # the plot and the section of serving.md, from the JSON

Each peer is installed into ``out/peers/NAME`` if it is not there.  All servers of a network run at once, suspended
(SIGSTOP) except the one whose turn it is.  A turn is a warm-up; 64 clients that send single images in a closed loop;
one such client (the unloaded latency); Poisson arrivals at 70 % of the peak of this turn; and, where a request may
carry several images, four clients that send 32 each.  Every round also has a turn of the bare device step.  A
machine's speed changes within minutes, so ratios are taken within a round; the report has their medians.  One load
generator sends the requests from a process of its own.  Writes ``serving-peers.json``.
"""

from __future__ import annotations

import argparse
import contextlib
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

from benchmarks.runs import BUNDLE, RESULTS, Json, environment, write_json
from benchmarks.serving import ceilings, environments
from benchmarks.serving.adapters.settings import COUNTS, FACTORY
from benchmarks.serving.drive import Phase, Target, drive
from benchmarks.serving.gpu import GpuUse
from benchmarks.serving.histogram import FIRST_MS, PER_DECADE
from benchmarks.serving.load import digits
from benchmarks.serving.overhead import make_bundle
from benchmarks.serving.peers_report import draw, name_of, targets, write_report
from benchmarks.serving.processes import ROOT, Processes, ServerFailed, free_port
from benchmarks.serving.report import scraped
from benchmarks.serving.servers import BY_NAME, COMPUTE, OVERHEAD, SERVERS, Server, answer_of
from psc_core.model.predictor import PSC

CLIENTS, STEADY, MANY, MANY_CLIENTS = 64, 0.7, 32, 4
FIRST_WARM_UP_SECONDS, WARM_UP_SECONDS = 1.5, 0.3
SETTLE_SECONDS = 5.0
"""Between the last server's start and the first stop: Ray Serve loses its proxy when it is stopped while starting."""
ADAPTERS = "benchmarks.serving.adapters"
TOLERANCE = 1e-3
"""Peers decode with another library and batch differently; equal pixels agree to far less than this."""


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """The result of a call in a new process, which ends with it."""
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
        """Send one phase; returns its summary with the server's CPU time, memory and mean batch."""
        cpu_s, steps, images = processes.cpu_s(), *counted(counts)
        with GpuUse() as gpu:
            found: Json = self._pool.submit(drive, target, phase).result()
        found |= gpu.found
        found["server_cpu_s"] = round(processes.cpu_s() - cpu_s, 3)
        found["memory_mib"] = processes.memory_mib()
        now_steps, now_images = counted(counts)
        if now_steps > steps:
            found["mean_batch"] = round((now_images - images) / (now_steps - steps), 2)
        return found


def counted(folder: Path) -> tuple[int, int]:
    """Steps and images so far, of all processes of an adapter."""
    pairs = [COUNTS.unpack(file.read_bytes()) for file in folder.iterdir()]
    return sum(steps for steps, _ in pairs), sum(images for _, images in pairs)


def check_answer(server: Server, answer: Json, bundle: Path, image: bytes) -> None:
    """Check that a server answers like the library.

    Raises:
        ServerFailed: It does not.
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
            raise ServerFailed(f"{server.label} answered {got}, the library {wanted}")


class Metrics:
    """Mean batch size of one ``psc-serve`` process between two reads of its ``/metrics``."""

    def __init__(self, processes: Processes, port: int) -> None:
        self._read = lambda: processes.get(port, "/metrics")
        self._before = self._sums()

    def mean_batch(self) -> float | None:
        """Images a device step since the last call."""
        before, self._before = self._before, self._sums()
        steps, images = (after - last for after, last in zip(self._before, before, strict=True))
        return round(images / steps, 2) if steps else None

    def _sums(self) -> tuple[float, float]:
        metrics = scraped(self._read())
        return metrics["psc_batch_size_count"], metrics["psc_batch_size_sum"]


class RunningServer:
    """A started server with a bundle, whose answer agrees with the library's.

    Args:
        server: Its description.
        network: Name of the bundle's network.
        bundle: To serve.
        images: PNG files to send.
        device: cpu or cuda.

    Raises:
        ServerFailed: It ended, did not answer, or answered differently from the library.
    """

    def __init__(self, server: Server, network: str, bundle: Path, images: Sequence[bytes], device: str) -> None:
        python, began, port = server.python(), time.monotonic(), free_port()
        with contextlib.ExitStack() as stack:
            self._counts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psc-benchmark-")))
            command = server.command(python, port=port, bundle=bundle, device=device)
            variables = server.variables(network, port=port, bundle=bundle, counts=self._counts, device=device)
            self._processes = stack.enter_context(Processes(command, variables))
            self._single = server.target(port, images)
            self._many = server.target_of_many(port, images, MANY) if network == COMPUTE else None
            body = self._processes.wait_until_ready(self._single)
            check_answer(server, answer_of(server, body), bundle, images[0])
            self._metrics = Metrics(self._processes, port) if server.name == "psc" else None
            self.about: Json = {
                "versions": environments.versions(python, server.packages),
                "start_s": round(time.monotonic() - began, 1),
            }
            self._warm_up_s = FIRST_WARM_UP_SECONDS
            self._stack = stack.pop_all()

    def turn(self, client: Client, seconds: float) -> Json:
        """Run all phases once.

        Raises:
            ServerFailed: It stopped answering.
        """
        found: Json = {}

        def phase(name: str, target: Target, phase: Phase) -> None:
            found[name] = client.send(self._processes, target, phase, self._counts)
            if self._metrics is not None and (mean := self._metrics.mean_batch()) is not None:
                found[name]["mean_batch"] = mean

        warm_up_s, self._warm_up_s = self._warm_up_s, WARM_UP_SECONDS
        with self._processes.resumed():
            self._processes.wait_until_ready(self._single)
            phase("warm-up", self._single, Phase(warm_up_s, clients=CLIENTS))
            phase("closed", self._single, Phase(seconds, clients=CLIENTS))
            phase("unloaded", self._single, Phase(max(0.5, seconds / 4), clients=1))
            if not found["closed"]["requests_per_s"] or not found["unloaded"]["requests_per_s"]:
                raise ServerFailed(f"answered {found['closed']['statuses']}: {self._processes.tail()}")
            phase("steady", self._single, Phase(seconds, per_second=STEADY * found["closed"]["requests_per_s"]))
            if self._many is not None:
                phase("warm-up", self._many, Phase(warm_up_s, clients=MANY_CLIENTS))
                phase("many", self._many, Phase(seconds, clients=MANY_CLIENTS))
        del found["warm-up"]
        for name in found.keys() - {"steady"}:
            del found[name]["histogram"]
        return found

    def stop(self) -> None:
        """Suspend it until its next turn."""
        self._processes.stop()

    def close(self) -> None:
        """Terminate it."""
        self._stack.close()


def measure_http(
    module: str, bundle: Path, answer: Path, images: Sequence[bytes], seconds: float, client: Client
) -> Json:
    """A closed loop against an adapter without a model."""
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        port = free_port()
        shell = Server(module, module, ("-m", f"{ADAPTERS}.{module}"), "")
        variables = shell.variables(OVERHEAD, port=port, bundle=bundle, counts=Path(scratch), device="cpu")
        variables["PSC_BENCH_ANSWER"] = str(answer)
        target = shell.target(port, images)
        command = shell.command(Path(sys.executable), port=port, bundle=bundle, device="cpu")
        with Processes(command, variables) as processes:
            processes.wait_until_ready(target)
            client.send(processes, target, Phase(FIRST_WARM_UP_SECONDS, clients=CLIENTS), Path(scratch))
            return client.send(processes, target, Phase(seconds, clients=CLIENTS), Path(scratch))


class Run:
    """The record, written after every part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device: str = args.device
        self.seconds: float = args.seconds
        self.rounds: int = args.rounds
        self.servers = [server for server in SERVERS if not args.only or server.name in args.only]
        self._file: Path = args.out / f"{name_of(args.device)}.json"
        self.record: Json = {
            "command": f"python -m benchmarks.serving.peers --seconds {self.seconds:g} --rounds {self.rounds}"
            + (f" --only {' '.join(args.only)}" if args.only else "")
            + (f" --device {self.device}" if self.device != "cpu" else ""),
            "environment": environment(torch.device(self.device)),
            "device": self.device,
            "note": args.note,
            "seconds": self.seconds,
            "clients": CLIENTS,
            "many": {"images": MANY, "clients": MANY_CLIENTS},
            "bins": {"first_ms": FIRST_MS, "per_decade": PER_DECADE},
            "settings": {server.name: server.settings for server in self.servers},
            "servers": {OVERHEAD: {}, COMPUTE: {}},
            "bare": {OVERHEAD: [], COMPUTE: []},
            "ceilings": {},
        }

    def write(self) -> None:
        """Write what was measured so far."""
        write_json(self._file, self.record)


def log(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def _short(turn: Json) -> str:
    return ", ".join(
        f"{name} {phase['images_per_s']:g}/s p50 {phase.get('p50_ms')} p99 {phase.get('p99_ms')} ms {phase['statuses']}"
        for name, phase in turn.items()
    )


def measure_network(run: Run, network: str, bundle: Path, images: Sequence[bytes], client: Client) -> None:
    """All rounds on one network; a server that fails is left out from then on, and the reason recorded."""
    found: Json = run.record["servers"][network]
    with contextlib.ExitStack() as stack:
        running: dict[str, RunningServer] = {}

        def attempt(server: Server, act: Callable[[], None]) -> None:
            try:
                act()
            except (ServerFailed, RuntimeError, KeyError, ValueError) as error:
                running.pop(server.name, None)
                found[server.name] = _failed(error)

        def start(server: Server) -> None:
            started = RunningServer(server, network, bundle, images, run.device)
            stack.callback(started.close)
            running[server.name] = started
            found[server.name] = {**started.about, "rounds": []}

        def take_turn(server: Server) -> None:
            turn = running[server.name].turn(client, run.seconds)
            found[server.name]["rounds"].append(turn)
            log(f"  {server.label}: {_short(turn)}")

        for server in run.servers:
            log(f"{network}: {server.label} starts")
            attempt(server, partial(start, server))
        time.sleep(SETTLE_SECONDS)
        for started in running.values():
            started.stop()
        for number in range(run.rounds):
            log(f"{network}: round {number + 1} of {run.rounds}")
            run.record["bare"][network].append(in_fresh_process(ceilings.bare_step, bundle, 2.0, run.device))
            for server in run.servers[number % len(run.servers) :] + run.servers[: number % len(run.servers)]:
                if server.name in running:
                    attempt(server, partial(take_turn, server))
            run.write()


def measure_ceilings(run: Run, bundle: Path, images: Sequence[bytes], client: Client) -> None:
    """Decoding alone, and HTTP alone."""
    answer = environments.HOME / "answer.json"
    answer.write_bytes(b'{"predictions":[' + b"0," * 350 + b"0]}")
    run.record["ceilings"]["decode"] = in_fresh_process(ceilings.decode_only, bundle, images, 2.0)
    for module in ("bare", "instant"):
        log(f"ceiling: {module}")
        try:
            run.record["ceilings"][module] = measure_http(module, bundle, answer, images, run.seconds, client)
        except ServerFailed as error:
            run.record["ceilings"][module] = _failed(error)
    run.write()


def _failed(error: Exception) -> Json:
    reason = str(error).replace(str(ROOT), "")[:600]
    log(f"  failed: {reason}")
    return {"failed": reason}


def main() -> int:
    """Measure, or write the report of what was measured."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="NAME", help="only these servers")
    cli.add_argument("--seconds", type=float, default=2.0, help="length of a phase")
    cli.add_argument("--rounds", type=int, default=5, help="turns of every server")
    cli.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of every server")
    cli.add_argument("--out", type=Path, default=RESULTS)
    cli.add_argument("--build", action="store_true", help="only install the peers")
    cli.add_argument("--report", action="store_true", help="only write the plot and the section of serving.md")
    cli.add_argument("--note", default="", help="a sentence on the circumstances, kept with the results")
    args = cli.parse_args()
    if args.report:
        write_report(json.loads((args.out / f"{name_of(args.device)}.json").read_text()), args.out)
        return 0
    run = Run(args)
    for server in run.servers:
        log(f"{server.label}: {server.python()}")
    if args.build:
        return 0
    tiny = environments.HOME / OVERHEAD
    bundles = {
        OVERHEAD: tiny if (tiny / "manifest.json").exists() else make_bundle(tiny),
        COMPUTE: BUNDLE,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    images = digits(256)
    with Client() as client:
        for network, bundle in bundles.items():
            measure_network(run, network, bundle, images, client)
        measure_ceilings(run, bundles[OVERHEAD], images, client)
    run.record["targets"] = targets(run.record)
    run.write()
    draw(run.record, args.out)
    for target in run.record["targets"]:
        print(f"{'met    ' if target['met'] else 'NOT MET'}  {target['target']}: {target['measured']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
