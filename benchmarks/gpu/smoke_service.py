"""Checks of the service on a device: requests, two models, reloads, gauges, too little memory."""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from starlette.testclient import TestClient

from app.inference.batcher import Batcher
from app.inference.decoder import Decoder
from app.inference.engine import Engine
from app.inference.steps import EagerStep
from app.main import create_app
from app.settings import Settings
from benchmarks.gpu import bundles
from benchmarks.gpu.checks import needs_cuda
from benchmarks.runs import BUNDLE
from benchmarks.serving.images import digits
from psc_core.images.preprocess import PRESETS

KEY = "k" * 32
ADMIN = {"Authorization": f"Bearer {KEY}"}
FITS = 2
"""Images that there is memory for in :func:`out_of_memory`."""


@contextmanager
def serving(device: torch.device, *served: Path, **settings: Any) -> Iterator[TestClient]:
    """The application in this process, ready."""
    given = {"device": str(device), "max_batch_size": 16, "backend": "folded", "log_level": "error", **settings}
    app = create_app(Settings(bundle=tuple(map(str, served or (BUNDLE,))), admin_keys=(KEY,), **given))
    with TestClient(app) as client:
        for _ in range(3000):
            if client.get("/readyz").status_code == 200:
                break
            client.portal.call(asyncio.sleep, 0.02)  # type: ignore[union-attr]
        yield client


def service(device: torch.device) -> str:
    """Single images from 32 threads, an explanation, the metrics of both."""
    images = digits(64)
    with serving(device) as client, ThreadPoolExecutor(32) as pool:
        post = lambda body: client.post("/predict", content=body, headers={"Content-Type": "image/png"})  # noqa: E731
        statuses = [answer.status_code for answer in pool.map(post, images)]
        assert set(statuses) == {200}, f"statuses {sorted(set(statuses))}"
        explained = client.post("/predict?explain=true", content=images[0], headers={"Content-Type": "image/png"})
        assert explained.json()["predictions"][0]["explanation"]
        metrics = client.get("/metrics").text
    count = next(line.split()[-1] for line in metrics.splitlines() if line.startswith("psc_batch_size_count"))
    return f"{len(images)} images in {float(count):g} steps"


def two_bundles(device: torch.device) -> str:
    """A traced and a hooked model take turns on the device, each with streams and graphs of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        other = bundles.write(bundles.hooked(), Path(scratch) / "hooked")
        with (
            serving(device, BUNDLE, other, allow_factories=bundles.FACTORIES) as client,
            ThreadPoolExecutor(16) as pool,
        ):
            names = (BUNDLE.name, other.name)
            ask = lambda job: client.post(  # noqa: E731
                f"/models/{job[0]}/predict", content=job[1], headers={"Content-Type": "image/png"}
            )
            jobs = [(name, body) for body in digits(32) for name in names]
            alone = {name: ask((name, jobs[0][1])).json()["predictions"] for name in names}
            found = list(pool.map(ask, jobs))
    assert {answer.status_code for answer in found} == {200}
    for (name, _), answer in zip(jobs[:2], found, strict=False):
        got, expected = (each[0]["probabilities"] for each in (answer.json()["predictions"], alone[name]))
        np.testing.assert_allclose(list(_values(got)), list(_values(expected)), atol=1e-3)
    return ", ".join(names)


def reload(device: torch.device) -> str:
    """Reloads while it answers lose no request and, on a GPU, no memory."""
    (image,), held = digits(1), []
    with serving(device) as client, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            pending = [
                pool.submit(client.post, "/predict", content=image, headers={"Content-Type": "image/png"})
                for _ in range(16)
            ]
            answer = client.post("/admin/reload", headers=ADMIN)
            assert answer.status_code == 200, answer.text
            statuses = {each.result().status_code for each in pending}
            assert statuses == {200}, f"statuses {statuses}"
            gc.collect()
            held.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    assert held[-1] <= 1.1 * held[0], f"bytes allocated after each reload: {held}"
    return f"{held[-1] >> 20} MiB after three reloads" if device.type == "cuda" else "three reloads"


def gauges(device: torch.device) -> str:
    """Memory and utilisation of the GPU in ``/metrics``."""
    needs_cuda(device)
    with serving(device) as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("psc_gpu_")]
    assert any(line.startswith("psc_gpu_memory_bytes") for line in lines), "no psc_gpu_memory_bytes"
    assert any(line.startswith("psc_gpu_utilisation_ratio") for line in lines), "no psc_gpu_utilisation_ratio: NVML?"
    return "; ".join(lines)[:300]


class Hungry:
    """A network that needs a part of the device's memory for each image; on a CPU it only says so."""

    is_traced = False

    def __init__(self, device: torch.device) -> None:
        self.device, self.sizes = device, list[int]()

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        self.sizes.append(len(images))
        if self.device.type == "cuda":
            each = torch.cuda.mem_get_info(self.device)[1] // (FITS + 1)
            torch.empty(each * len(images), dtype=torch.uint8, device=self.device)
        elif len(images) > FITS:
            raise torch.OutOfMemoryError("simulated")
        return images.flatten(1).float().mean(1, keepdim=True)

    def explain(self, images: torch.Tensor, /) -> Any:
        """Outputs and nothing else."""
        return self(images), {}


class _Silent:
    def batch(self, size: int, seconds: float, waits: Any) -> None:
        """Ignored."""

    def decoded(self, seconds: float) -> None:
        """Ignored."""


def out_of_memory(device: torch.device) -> str:
    """A batch that the device has no memory for is run in halves, and every image gets its own answer."""
    preprocess, network = PRESETS["mnist"], Hungry(device)
    step = EagerStep(network, preprocess.shape, max_batch=8, device=device)  # type: ignore[arg-type]
    step.warm_up = lambda: False  # type: ignore[method-assign]
    images = np.stack([np.full(preprocess.shape, value, np.uint8) for value in range(8)])

    async def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            engine = Engine(
                "hungry",
                step,
                Decoder(pool, threads=1, preprocess=preprocess, max_pixels=10_000, inline_bytes=1 << 20),
                batcher=Batcher(max_batch_size=8, max_queue_images=64, max_delay_s=0.0),
                observer=_Silent(),
                on_failure=lambda error: None,
                deadline_s=50.0,
            )
            await engine.start()
            try:
                return (await engine.predict(images)).packed
            finally:
                await engine.close(within_s=5)

    np.testing.assert_allclose(asyncio.run(run())[:, 0], range(8), atol=1e-3)
    assert max(network.sizes) == 8 and min(network.sizes) <= FITS, f"batches of {network.sizes}"
    return f"batches of {network.sizes}" + ("" if device.type == "cuda" else ", the error was simulated")


def _values(probabilities: Any) -> Any:
    return probabilities.values() if isinstance(probabilities, dict) else probabilities
