"""Keep a started server suspended between its turns, and the load generator in a process."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks.instruction_sets import fresh_process
from benchmarks.runs import Json
from benchmarks.serving import curve
from benchmarks.serving.adapters.settings import COUNTS, FACTORY
from benchmarks.serving.client import Phase, Target, drive
from benchmarks.serving.gpu import GpuUse
from benchmarks.serving.processes import Processes, ServerFailed, free_port, mean_batch, scraped
from benchmarks.serving.servers import COMPUTE, OURS, Server, answer_of, versions
from psc_core.model import PSC
from psc_core.settings import BACKENDS

CLIENTS, MANY, MANY_CLIENTS = 64, 32, 4
FIRST_WARM_UP_SECONDS, WARM_UP_SECONDS = 1.5, 0.3
TOLERANCE = 1e-3
"""The tolerance of answers: peers decode with another library and batch otherwise, but agree far better than this."""


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


def check_answer(server: Server, answer: Json, bundle: Path, image: bytes, resizer: str = "torch") -> None:
    """Check that a server answers like the library with the same ``resizer``.

    Raises:
        ServerFailed: It does not.
    """
    psc = PSC.load(bundle, device="cpu", allow_factories=[FACTORY])
    expected = psc.predict(torch.from_numpy(replace(psc.preprocess, resizer=resizer).from_bytes(image))[None])
    pairs = [
        (answer["predictive_entropy"], float(expected.predictive_entropy[0])),
        (answer["log_density"], float(expected.log_density[0])),
        (answer["ood_p_value"], float(expected.ood_p_value[0])),
        *zip(answer["probabilities"], expected.probabilities[0].tolist(), strict=True),
    ]
    for got, wanted in pairs:
        if not math.isclose(got, wanted, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
            raise ServerFailed(f"{server.label} answered {got}, the library {wanted}")


class RunningServer:
    """A started server with a bundle, whose answers agree with the library's.

    Args:
        server: The description of the server.
        case: One of :data:`~benchmarks.serving.servers.CASES`.
        bundle: The bundle to serve.
        images: The files to send.
        device: cpu or cuda.

    Raises:
        ServerFailed: The server ended, did not answer, or answered differently from the library.
    """

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
            check_answer(server, answer_of(server, body), bundle, images[0], server.resizer(case))
            self._port = port if server.name == "psc" else None
            self.about: Json = {
                "versions": versions(python, server.packages),
                "start_s": round(time.monotonic() - began, 1),
                "backend": json.loads(Processes.get(port, "/model"))["backend"] if server.name in OURS else BACKENDS[0],
            }
            self._warm_up_s = FIRST_WARM_UP_SECONDS
            self._stack = stack.pop_all()

    def turn(self, client: Client, seconds: float) -> Json:
        """Run the closed loops: single images from many clients and from one, and requests of several images.

        Raises:
            ServerFailed: It stopped answering.
        """
        found: Json = {}
        warm_up_s, self._warm_up_s = self._warm_up_s, WARM_UP_SECONDS
        with self._resumed():
            self._phase(client, self._single, Phase(warm_up_s, clients=CLIENTS))
            found["closed"] = self._phase(client, self._single, Phase(seconds, clients=CLIENTS))
            found["unloaded"] = self._phase(client, self._single, Phase(max(0.5, seconds / 4), clients=1))
            if not found["closed"]["requests_per_s"] or not found["unloaded"]["requests_per_s"]:
                raise ServerFailed(f"answered {found['closed']['statuses']}: {self._processes.tail()}")
            if self._many is not None:
                self._phase(client, self._many, Phase(warm_up_s, clients=MANY_CLIENTS))
                found["many"] = self._phase(client, self._many, Phase(seconds, clients=MANY_CLIENTS))
        return found

    def point(self, client: Client, per_s: float, seconds: float) -> Json:
        """Send Poisson arrivals at a rate, and return a point of the curve.

        Raises:
            ServerFailed: It stopped answering.
        """
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
        """Suspend the server until its next turn."""
        self._processes.stop()

    def close(self) -> None:
        """Terminate the server."""
        self._stack.close()
