"""The checks of the smoke run on a device: the step of the service in its forms, and the service itself.

    python -m benchmarks.gpu.checks reload cuda

A check returns a note, or raises an error or :class:`Skipped`.  It repeats neither the tests of ``tests/gpu`` (the same
numbers as on the CPU, captured graphs, fits) nor the device benchmark (large images, many classes).
"""

from __future__ import annotations

import asyncio
import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import SecretStr
from starlette.testclient import TestClient
from torch import Tensor

from app.inference.batcher import Batcher, RequestMode
from app.inference.decoder import Decoder
from app.inference.engine import Engine
from app.inference.steps import EagerStep, Step, make_step
from app.main import allow_compiled_shapes, create_app
from app.memory import MemoryBudget
from app.settings import Settings
from benchmarks.runs import BUNDLE, plain_parser
from benchmarks.serving import bundles
from benchmarks.serving import images as files
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.model import PSC
from psc_core.pipeline import Pipeline

KEY = "k" * 32
FITS = 2
"""The number of images that fit in memory in :func:`out_of_memory`."""


class Skipped(Exception):
    """The device cannot run the check; the message says why."""


def needs_cuda(device: torch.device) -> None:
    """Skip the check on a CPU."""
    if device.type != "cuda":
        raise Skipped("needs CUDA")


def digits(count: int) -> Tensor:
    """Return real digits, ``uint8``."""
    data = open_dataset(f"dirty-mnist:{files.DATA}", split="test", preprocess=PRESETS["mnist"])
    return next(iter(data.batches(count))).images


# -- the step -------------------------------------------------------------------------------------------------


def hooks(device: torch.device) -> str:
    """Check that a network cut by hooks runs eagerly, also on a GPU."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = bundles.hooked(Path(scratch) / "hooked")
        psc = PSC.load(folder, device=device, allow_factories=[bundles.UNTRACEABLE])
    assert not psc.pipeline.is_traced
    step = warm(psc.pipeline, psc, 8)
    assert isinstance(step, EagerStep)
    return same_as_eager(step, psc.pipeline, digits(8), 1e-3)


def explain(device: torch.device) -> str:
    """Check that explanations through the step equal the CPU's."""
    images = digits(4)
    results = []
    for where in (device, torch.device("cpu")):
        psc = PSC.load(BUNDLE, device=where)
        results.append(warm(psc.pipeline, psc, 4).explain(images.numpy(), RequestMode.EXPLAIN))
    got, expected = results
    assert set(got.explanation) == set(expected.explanation) != set()
    for name, array in expected.explanation.items():
        np.testing.assert_allclose(got.explanation[name], array, rtol=1e-2, atol=0.05, err_msg=name)
    return ", ".join(got.explanation)


def compiled(device: torch.device) -> str:
    """Check that ``--compile`` gives the same outputs."""
    allow_compiled_shapes()
    psc = PSC.load(BUNDLE, device=device)
    step = make_step(psc.pipeline, psc.preprocess.shape, max_batch=2, device=psc.device, compiled=True)
    step.warm_up()
    return same_as_eager(step, psc.pipeline, digits(2), 0.05)


def warm(network: Pipeline, psc: PSC, max_batch: int) -> Step:
    """Return the service's step, warmed up."""
    step = make_step(network, psc.preprocess.shape, max_batch=max_batch, device=psc.device)
    step.warm_up()
    return step


def same_as_eager(step: Step, network: Pipeline, images: Tensor, atol: float) -> str:
    """Check that the step's outputs equal the pipeline's, at a whole batch and at a smaller one."""
    worst = 0.0
    for count in (1, len(images)):
        step.input(0)[:count] = images[:count].numpy()
        step.launch(0, count)
        got = step.fetch(0, count)
        with torch.inference_mode():
            expected = network(images[:count].to(network.scorer.scale.device)).float().cpu().numpy()
        classes = slice(expected.shape[1] - 10, None)
        worst = max(worst, float(np.abs(got - expected)[:, classes].max()))
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=atol)
    return f"{type(step).__name__}, largest difference of the last ten columns {worst:.1e}"


# -- the service ----------------------------------------------------------------------------------------------


@contextmanager
def serving(device: torch.device, *served: Path, **settings: Any) -> Iterator[TestClient]:
    """Run the application in this process, and yield it when it is ready."""
    given: dict[str, Any] = {
        "device": str(device),
        "max_batch_size": 16,
        "backend": "folded",
        "log_level": "error",
        **settings,
    }
    app = create_app(Settings(bundle=tuple(map(str, served or (BUNDLE,))), admin_keys=(SecretStr(KEY),), **given))
    with TestClient(app) as client:
        for _ in range(3000):
            if client.get("/readyz").status_code == 200:
                break
            client.portal.call(asyncio.sleep, 0.02)  # type: ignore[union-attr]
        yield client


def post(client: TestClient, image: bytes, path: str = "/predict") -> Any:
    """Return the answer for one PNG digit."""
    return client.post(path, content=image, headers={"Content-Type": "image/png"})


def service(device: torch.device) -> str:
    """Send single images from 32 threads and an explanation, and check the metrics of both."""
    images = files.digits(64)
    with serving(device) as client, ThreadPoolExecutor(32) as pool:
        statuses = {answer.status_code for answer in pool.map(partial(post, client), images)}
        assert statuses == {200}, f"statuses {statuses}"
        explained = post(client, images[0], "/predict?explain=true")
        assert explained.json()["predictions"][0]["explanation"]
        metrics = client.get("/metrics").text
    count = next(line.split()[-1] for line in metrics.splitlines() if line.startswith("psc_batch_size_count"))
    return f"{len(images)} images in {float(count):g} steps"


def two_bundles(device: torch.device) -> str:
    """Check a traced and a hooked model that take turns on the device, each with its own streams and graphs."""
    with tempfile.TemporaryDirectory() as scratch:
        other = bundles.hooked(Path(scratch) / "hooked")
        paths = [f"/models/{name}/predict" for name in (BUNDLE.name, other.name)]
        jobs = [(image, path) for image in files.digits(32) for path in paths]
        with (
            serving(device, BUNDLE, other, allow_factories=(bundles.UNTRACEABLE,)) as client,
            ThreadPoolExecutor(16) as pool,
        ):
            alone = [post(client, *job).json()["predictions"][0]["confidence"] for job in jobs[:2]]
            found = list(pool.map(lambda job: post(client, *job), jobs))
    assert {answer.status_code for answer in found} == {200}
    together = [answer.json()["predictions"][0]["confidence"] for answer in found[:2]]
    np.testing.assert_allclose(together, alone, atol=1e-3)
    return ", ".join(paths)


def reload(device: torch.device) -> str:
    """Check that reloads under load lose no request and, on a GPU, no memory."""
    (image,), held = files.digits(1), []
    with serving(device) as client, ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            pending = [pool.submit(post, client, image) for _ in range(16)]
            answer = client.post("/admin/reload", headers={"Authorization": f"Bearer {KEY}"})
            assert answer.status_code == 200, answer.text
            statuses = {each.result().status_code for each in pending}
            assert statuses == {200}, f"statuses {statuses}"
            gc.collect()
            held.append(torch.cuda.memory_allocated(device) if device.type == "cuda" else 0)
    assert held[-1] <= 1.1 * held[0], f"bytes allocated after each reload: {held}"
    return f"{held[-1] >> 20} MiB after three reloads" if device.type == "cuda" else "three reloads"


def gauges(device: torch.device) -> str:
    """Check that ``/metrics`` has the memory and utilisation of the GPU."""
    needs_cuda(device)
    with serving(device) as client:
        lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("psc_gpu_")]
    assert any(line.startswith("psc_gpu_memory_bytes") for line in lines), "no psc_gpu_memory_bytes"
    assert any(line.startswith("psc_gpu_utilisation_ratio") for line in lines), "no psc_gpu_utilisation_ratio: NVML?"
    return "; ".join(lines)[:300]


class Hungry:
    """A network that takes a part of the device's memory for each image; on a CPU it only pretends to."""

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
        """Return outputs without an explanation."""
        return self(images), {}


class _Silent:
    def batch(self, size: int, seconds: float, waits: Any) -> None:
        pass

    def decoded(self, seconds: float) -> None:
        pass


def out_of_memory(device: torch.device) -> str:
    """Check that a batch too large for the device's memory runs in halves, and every image gets its own answer."""
    preprocess, network = PRESETS["mnist"], Hungry(device)
    step = EagerStep(network, preprocess.shape, max_batch=8, device=device)  # type: ignore[arg-type]
    step.warm_up = lambda *_: False  # type: ignore[method-assign]
    images = np.stack([np.full(preprocess.shape, value, np.uint8) for value in range(8)])

    async def run() -> Any:
        with ThreadPoolExecutor(1) as pool:
            engine = Engine(
                "hungry",
                step,
                Decoder(
                    pool,
                    MemoryBudget(1 << 30, 1 << 40, max_pixels=10_000),
                    threads=1,
                    preprocess=preprocess,
                    max_pixels=10_000,
                    max_request_pixels=1 << 20,
                    inline_bytes=1 << 20,
                ),
                batcher=Batcher(max_batch=8, max_queue_images=64, max_delay_s=0.0),
                recorder=_Silent(),  # type: ignore[arg-type]
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


CHECKS: Mapping[str, Callable[[torch.device], str]] = {
    "hooks": hooks,
    "explain": explain,
    "out of memory": out_of_memory,
    "service": service,
    "two bundles": two_bundles,
    "reload": reload,
    "gauges": gauges,
    "compile": compiled,
}
"""The checks in the order in which they run, the longest last."""

SKIPPED = 77
"""The exit code of a check that the device cannot run."""


def main(argv: list[str] | None = None) -> int:
    """Run one check and print its note as the last line."""
    cli = plain_parser(__doc__)
    cli.add_argument("check", choices=list(CHECKS))
    cli.add_argument("device", type=torch.device)
    args = cli.parse_args(argv)
    try:
        print(CHECKS[args.check](args.device))
    except Skipped as reason:
        print(reason)
        return SKIPPED
    return 0


if __name__ == "__main__":
    sys.exit(main())
