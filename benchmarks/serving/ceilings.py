"""Measure upper bounds for every server, each in a process of its own: the device step alone, decoding alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.instruction_sets import fresh_process

SIZES = (1, 8, 32, 64)
Times = Mapping[str, float]  # The milliseconds of a step, by batch size.


class BareSteps:
    """The device step of a model on each of its backends, in one process that waits between its turns."""

    def __init__(self, bundle: Path, device: str) -> None:
        self._pool = fresh_process()
        self._pool.submit(_prepare, bundle, device).result()

    def measure(self, seconds: float) -> dict[str, Any]:
        """Return ``step_ms``: :data:`Times` by backend."""
        found: dict[str, Any] = self._pool.submit(_measure, seconds).result()
        return found

    def close(self) -> None:
        self._pool.shutdown()


_steps: dict[str, Any] = {}


def _prepare(bundle: Path, device: str) -> None:
    import torch

    from app.inference.steps import TorchThreads, make_step
    from benchmarks.serving.adapters.settings import FACTORY, MAX_BATCH
    from psc_core.allocator import keep_freed_memory
    from psc_core.model import PSC
    from psc_core.pipeline import available_backends, pipeline_on

    keep_freed_memory()
    psc = PSC.load(bundle, device=device, allow_factories=[FACTORY])
    step_of = partial(
        make_step,
        shape=psc.preprocess.shape,
        max_batch=MAX_BATCH,
        device=psc.device,
        threads=TorchThreads(torch.get_num_threads(), 1),
    )
    for backend in available_backends(psc):
        step = step_of(pipeline_on(psc, backend))
        step.input(0)[:] = torch.randint(0, 256, step.input(0).shape, dtype=torch.uint8).numpy()
        step.warm_up()
        _steps[backend] = step


def _measure(seconds: float) -> dict[str, Any]:
    times: dict[tuple[str, int], list[float]] = {(backend, count): [] for count in SIZES for backend in _steps}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or not all(times.values()):
        for (backend, count), found in times.items():
            began = time.perf_counter()
            _steps[backend].launch(0, count)
            _steps[backend].fetch(0, count)
            found.append(time.perf_counter() - began)
    return {
        "step_ms": {
            backend: {str(count): round(1000 * statistics.median(times[backend, count]), 4) for count in SIZES}
            for backend in _steps
        },
    }


def images_per_s(steps: Mapping[str, Times], size: float) -> float:
    """Return images/s of the fastest backend at a mean batch size, interpolating the times between sizes linearly."""
    size = min(max(size, SIZES[0]), SIZES[-1])
    return max(
        1000 * size / float(np.interp(size, SIZES, [step_ms[str(count)] for count in SIZES]))
        for step_ms in steps.values()
    )


def best_images_per_s(steps: Mapping[str, Times]) -> float:
    """Return images/s of the fastest backend at its best batch size."""
    return max(1000 * int(count) / value for step_ms in steps.values() for count, value in step_ms.items())


def decode_only(bundle: Path, images: Sequence[bytes], seconds: float) -> float:
    """Return images/s of the service's decoder on one core."""
    from benchmarks.serving.adapters.settings import FACTORY
    from psc_core.model import PSC

    preprocess = PSC.load(bundle, device="cpu", allow_factories=[FACTORY]).preprocess
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for image in images:
            preprocess.from_bytes(image)
        count += len(images)
    return round(count / (time.perf_counter() - began), 1)
