"""Run servers, suspended between turns, and the load generator; measure CPU time, memory and GPU.  Linux only."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.instruction_sets import fresh_process
from benchmarks.runs import ROOT, Json
from benchmarks.serving import curve
from benchmarks.serving.adapters.settings import COUNTS, FACTORY
from benchmarks.serving.client import Generator, Phase, Target, drive
from benchmarks.serving.servers import COMPUTE, OURS, Server, answer_of, versions
from psc_core.model import PSC
from psc_core.settings import BACKENDS

CLIENTS, MANY, MANY_CLIENTS = 64, 32, 4
FIRST_WARM_UP_SECONDS, WARM_UP_SECONDS = 1.5, 0.3
BF16_TOLERANCE = 0.05  # A GPU serves in bfloat16, whose sums depend on the device.
TOLERANCE = 1e-3  # Peers decode with another library and batch otherwise, but their answers agree far better.
EVERY_MS = 100
_GPU_QUERY = ("nvidia-smi", "--id=0", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")
_TICKS = os.sysconf("SC_CLK_TCK")


class ServerFailed(Exception):
    """The server ended or did not answer in time; the message ends with its last output."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Processes:
    """A command and all its descendants in a session of their own, terminated at the end of the ``with`` block."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path | None = None) -> None:
        self._log = log.open("w+b") if log else tempfile.TemporaryFile(prefix="psc-benchmark-")  # noqa: SIM115
        self._process = subprocess.Popen(
            list(command),
            cwd=ROOT,
            env=dict(environment),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._seen: set[int] = {self._process.pid}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
        self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(15)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def wait(self, seconds: float) -> int | None:
        """Return the exit code of the command; None if it still runs after that time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def stop(self) -> None:
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def pids(self) -> set[int]:
        """Return the living processes: the command's descendants, the members of its session, and their children."""
        table = _processes()
        while True:
            more = {
                pid
                for pid, (parent, session) in table.items()
                if pid not in self._seen and (parent in self._seen or session == self._process.pid)
            }
            if not more:
                return self._seen & table.keys()
            self._seen |= more

    def cpu_s(self) -> float:
        """Return the user and system time of all living processes so far, seconds."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICKS

    def memory_mib(self) -> int:
        """Return the resident memory of all processes; shared pages count for each."""
        pages = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") >> 20

    @staticmethod
    def get(port: int, path: str) -> str:
        return asyncio.run(Generator(Target(port, path, "", [])).get(path))

    def wait_until_ready(self, target: Target, seconds: float = 120.0) -> bytes:
        """Post the first body until the status is 200, and return that response."""
        end, last = time.monotonic() + seconds, "no response"
        while time.monotonic() < end:
            if self._process.poll() is not None:
                raise ServerFailed(f"ended with code {self._process.returncode}: {self.tail()}")
            try:
                status, body = asyncio.run(_post_once(target))
            except (OSError, EOFError, TimeoutError) as error:
                last = str(error)
            else:
                if status == 200:
                    return body
                last = f"status {status}: {body[:200]!r}"
            time.sleep(0.2)
        raise ServerFailed(f"no 200 within {seconds:g} s, {last}: {self.tail()}")

    def wait_until_idle(self, seconds: float = 60.0) -> None:
        """Return once the processes leave half of a core alone: ``psc-serve`` measures backends while it serves."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            before = self.cpu_s()
            time.sleep(1.0)
            if self.cpu_s() - before < 0.5:
                return

    def tail(self) -> str:
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 1500))
        return self._log.read().decode(errors="replace").strip()


def scraped(text: str) -> dict[str, float]:
    """Return the metrics of a service with one model, by name and labels without the model's name."""
    text = re.sub(r',?model="[^"]*"', "", text).replace("{,", "{").replace("{} ", " ")
    return {name: float(value) for name, value in re.findall(r"^(psc_\S+) (\S+)$", text, re.MULTILINE)}


def mean_batch(before: Mapping[str, float], after: Mapping[str, float]) -> float | None:
    """Return the mean number of images in a device step between two scrapes; None without a step."""
    images, steps = (after[key] - before[key] for key in ("psc_batch_size_sum", "psc_batch_size_count"))
    return round(images / steps, 2) if steps else None


async def _post_once(target: Target) -> tuple[int, bytes]:
    return await asyncio.wait_for(Generator(target).post(), 30)


def _processes() -> dict[int, tuple[int, int]]:
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                table[int(entry.name)] = (int(fields[1]), int(fields[3]))
    return table


class GpuUse:
    """Samples inside the ``with`` block; finds nothing without ``nvidia-smi``."""

    def __init__(self) -> None:
        self.found: Json = {}

    def __enter__(self) -> GpuUse:
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                [*_GPU_QUERY, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _nothing = self._process.communicate()
        samples = [sample for line in text.splitlines() if (sample := _gpu_sample(line)) is not None]
        if samples:
            busy, used = zip(*samples, strict=True)
            self.found = {"gpu_utilisation": round(statistics.mean(busy) / 100, 3), "gpu_memory_mib": max(used)}


def _gpu_sample(line: str) -> tuple[int, int] | None:
    """Return per cent and MiB; None for a truncated line and for ``[N/A]``."""
    try:
        busy, used = map(int, line.split(","))
    except ValueError:
        return None
    return busy, used


class Client:
    """The process of the load generator, one for the whole run."""

    def __init__(self) -> None:
        self._pool = fresh_process()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()

    def send(self, processes: Processes, target: Target, phase: Phase) -> Json:
        """Send one phase; return its summary with the server's CPU time and memory, and the GPU's utilisation."""
        cpu_s = processes.cpu_s()
        with GpuUse() as gpu:
            found: Json = self._pool.submit(drive, target, phase).result()
        server_cpu_s = round(processes.cpu_s() - cpu_s, 3)
        return {**found, **gpu.found, "server_cpu_s": server_cpu_s, "memory_mib": processes.memory_mib()}


def counted(folder: Path) -> tuple[int, int]:
    """Return the steps and images so far of all processes of an adapter."""
    pairs = [COUNTS.unpack(file.read_bytes()) for file in folder.iterdir()]
    return sum(steps for steps, _ in pairs), sum(images for _, images in pairs)


def check_answer(
    server: Server,
    answer: Json,
    bundle: Path,
    image: bytes,
    resizer: str = "torch",
    tolerance: float = TOLERANCE,
) -> None:
    """Check that a server answers like the library with the same ``resizer``."""
    psc = PSC.load(bundle, device="cpu", allow_factories=[FACTORY])
    expected = psc.predict(torch.from_numpy(replace(psc.preprocess, resizer=resizer).from_bytes(image))[None])
    pairs = [
        (answer["predictive_entropy"], float(expected.predictive_entropy[0])),
        (answer["log_density"], float(expected.log_density[0])),
        (answer["ood_p_value"], float(expected.ood_p_value[0])),
        *zip(answer["probabilities"], expected.probabilities[0].tolist(), strict=True),
    ]
    for got, wanted in pairs:
        if not math.isclose(got, wanted, rel_tol=tolerance, abs_tol=tolerance):
            raise ServerFailed(f"{server.label} answered {got}, the library {wanted}")


class RunningServer:
    """A started server with a bundle, whose answers agree with the library's."""

    def __init__(self, server: Server, case: str, bundle: Path, images: Sequence[bytes], device: str) -> None:
        python, began, port = server.python(), time.monotonic(), free_port()
        with contextlib.ExitStack() as stack:
            self._counts = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="psc-benchmark-")))
            command = server.command(python, port=port, bundle=bundle, device=device)
            variables = server.variables(case, port=port, bundle=bundle, counts=self._counts, device=device)
            self._processes = stack.enter_context(Processes(command, variables))
            self._single = server.target(port, images)
            self._many = server.target_of_many(port, images, MANY) if case == COMPUTE else None
            body = self._processes.wait_until_ready(self._single)
            tolerance = TOLERANCE if device == "cpu" else BF16_TOLERANCE
            check_answer(server, answer_of(server, body), bundle, images[0], server.resizer(case), tolerance)
            self._port = port if server.name == "psc" else None
            start_s = round(time.monotonic() - began, 1)
            self._processes.wait_until_idle()
            self.about: Json = {
                "versions": versions(python, server.packages),
                "start_s": start_s,
                "backend": json.loads(Processes.get(port, "/model"))["backend"] if server.name in OURS else BACKENDS[0],
            }
            self._warm_up_s = FIRST_WARM_UP_SECONDS
            self._stack = stack.pop_all()

    def turn(self, client: Client, seconds: float, load: float | None = None) -> Json:
        """Run the closed loops: single images from many clients and from one, and requests of several images.

        With ``load``, Poisson arrivals at that part of the first loop's rate follow.
        """
        found: Json = {}
        warm_up_s, self._warm_up_s = self._warm_up_s, WARM_UP_SECONDS
        with self._resumed():
            self._phase(client, self._single, Phase(warm_up_s, clients=CLIENTS))
            found["closed"] = self._phase(client, self._single, Phase(seconds, clients=CLIENTS))
            found["unloaded"] = self._phase(client, self._single, Phase(max(0.5, seconds / 4), clients=1))
            if not found["closed"]["requests_per_s"] or not found["unloaded"]["requests_per_s"]:
                raise ServerFailed(f"answered {found['closed']['statuses']}: {self._processes.tail()}")
            if load:
                per_s = load * found["closed"]["requests_per_s"]
                found["loaded"] = self._phase(client, self._single, Phase(seconds, per_second=per_s))
            if self._many is not None:
                self._phase(client, self._many, Phase(warm_up_s, clients=MANY_CLIENTS))
                found["many"] = self._phase(client, self._many, Phase(seconds, clients=MANY_CLIENTS))
        return found

    def point(self, client: Client, per_s: float, seconds: float) -> Json:
        """Send Poisson arrivals at a rate, and return a point of the curve."""
        seconds = curve.duration(per_s, seconds)
        with self._resumed():
            self._phase(client, self._single, Phase(WARM_UP_SECONDS, per_second=per_s))
            return curve.point(self._phase(client, self._single, Phase(seconds, per_second=per_s)), per_s, seconds)

    @contextlib.contextmanager
    def _resumed(self) -> Iterator[None]:
        self._processes.resume()
        try:
            self._processes.wait_until_ready(self._single)
            yield
        finally:
            self._processes.stop()

    def _phase(self, client: Client, target: Target, phase: Phase) -> Json:
        before = self._counted()
        found = client.send(self._processes, target, phase)
        mean = mean_batch(before, self._counted())
        return found if mean is None else {**found, "mean_batch": mean}

    def _counted(self) -> dict[str, float]:
        """Return the steps and images so far, from the metrics of ``psc-serve`` or the files of a peer's adapter."""
        if self._port is not None:
            return scraped(Processes.get(self._port, "/metrics"))
        steps, images = counted(self._counts)
        return {"psc_batch_size_count": steps, "psc_batch_size_sum": images}

    def stop(self) -> None:
        self._processes.stop()

    def close(self) -> None:
        self._stack.close()
