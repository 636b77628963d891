"""Choose the backend of a model: the fastest, as measured on the machine that serves, before the first request.

Measuring takes seconds, so the choice is kept beside the networks that were exported for it.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor

from psc_core.errors import NetworkError
from psc_core.model import Backend
from psc_core.model.backends import available_backends, pipeline_on
from psc_core.model.base import FittedModel
from psc_core.model.pipeline import Pipeline
from psc_core.network.onnx import INSTALLED
from psc_core.network.onnx.export import cache_file, read_checked, write_checked

logger = logging.getLogger("psc.backend")

Name = TypeVar("Name", bound=str)

Seconds = list[float]
"""The times of one batch, round by round."""

SLOWER_BY: Final = 1.03
"""A backend is not used if at some batch size it took longer than the plain network, by this factor, in every round."""

ONNX_ADVANTAGE: Final = 0.9
"""ONNX Runtime's times count as so much of themselves.

Measured alone, they lack what PyTorch loses while the service does other work: it waits for the interpreter's lock
around each operation, and for a core that decodes while the other threads have done their share.
"""

_ROUNDS: Final = 10
_SIZE_SECONDS: Final = 0.5
"""Rounds of a batch size end after this time, but not before the second."""

_LONG_SECONDS: Final = 0.25
"""Once a batch takes so long, larger ones are not measured: they take as long for each image."""


def choose_backend(
    model: FittedModel, wanted: Backend | Literal["auto"], *, max_batch: int, threads: int
) -> tuple[Backend, Pipeline]:
    """The name of the backend and the pipeline that runs on it.

    Args:
        model: A fitted model.
        wanted: A backend, or ``"auto"`` to measure them.  A model that has only one runs on that.
        max_batch: Maximum number of images in a step.
        threads: PyTorch's threads while measuring.

    Raises:
        NetworkError: The network does not run on the backend that was asked for.
    """
    names = available_backends(model)
    if wanted == "folded" and wanted in names:
        return wanted, model.pipeline
    if wanted != "auto" and (len(names) > 1 or names == (wanted,)):
        return wanted, pipeline_on(model, wanted)
    if wanted != "auto":
        reason = (
            "a network that the bundle holds as an ONNX graph runs in ONNX Runtime alone"
            if model.backbone.onnx is not None
            else "only a traced float32 network on a CPU has a choice of backends"
        )
        logger.warning("backend not used", extra={"backend": wanted, "reason": reason})
    kept = _kept(model, names, max_batch=max_batch, threads=threads)
    before = ((kept and read_checked(kept)) or b"").decode()
    pipelines: dict[Backend, Pipeline] = {}
    for name in [name for name in names if name == before] or names:
        try:
            pipelines[name] = pipeline_on(model, name)
        except NetworkError as error:
            logger.warning("backend not used", extra={"backend": name, "reason": str(error)})
    if len(pipelines) <= 1:
        return next(iter(pipelines.items()), ("folded", model.pipeline))
    images = torch.zeros((max_batch, *model.preprocess.shape), dtype=torch.uint8)
    with _torch_threads(threads):
        seconds = measure(pipelines, [images[:size] for size in sorted({1, min(8, max_batch), max_batch})])
    chosen = fastest(seconds, "plain")
    milliseconds = {name: [round(1e3 * median(rounds), 2) for rounds in times] for name, times in seconds.items()}
    logger.info("backend chosen", extra={"backend": chosen, "milliseconds": milliseconds})
    # Beside a busy neighbour each network's quickest round is its own, the median is the neighbour's too.
    undisturbed = {name: [[min(rounds)] for rounds in times] for name, times in seconds.items()}
    if kept and fastest(undisturbed, "plain") == chosen:
        write_checked(kept, chosen.encode())
    return chosen, pipelines[chosen]


def _kept(model: FittedModel, names: Sequence[Backend], *, max_batch: int, threads: int) -> Path | None:
    """The path at which a choice is kept: for a bundle, what the service is set to, versions and the processor."""
    if not INSTALLED or not model.version:  # Without ONNX Runtime there is little to measure.
        return None
    try:
        cpu = re.findall(r"(?:model name|flags|Features)\s*: (.*)", Path("/proc/cpuinfo").read_text())[:2]
    except OSError:
        cpu = [platform.processor()]
    limits = [os.environ.get(name) for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")]
    key = [model.version, names, max_batch, threads, platform.machine(), os.cpu_count(), cpu, limits]
    return cache_file("backend", json.dumps(key).encode())


@torch.inference_mode()
def measure(
    networks: Mapping[Name, Callable[[Tensor], Tensor]], batches: Sequence[Tensor]
) -> dict[Name, list[Seconds]]:
    """Seconds of each network on each batch, in rounds in which the networks take turns."""
    seconds: dict[Name, list[Seconds]] = {name: [] for name in networks}
    for batch in batches:
        for name, network in networks.items():
            network(batch)
            seconds[name].append([])
        end = time.perf_counter() + _SIZE_SECONDS
        for done in range(_ROUNDS):
            if done >= 2 and time.perf_counter() > end:
                break
            for name, network in networks.items():
                began = time.perf_counter()
                network(batch)
                seconds[name][-1].append(time.perf_counter() - began)
        if any(min(times[-1]) > _LONG_SECONDS for times in seconds.values()):
            break
    return seconds


def fastest(seconds: Mapping[Name, Sequence[Seconds]], baseline: Name) -> Name:
    """The least product of median times over batch sizes, see :data:`SLOWER_BY` and :data:`ONNX_ADVANTAGE`."""

    def is_slower(times: Seconds, base: Seconds) -> bool:
        return all(own > SLOWER_BY * other for own, other in zip(times, base, strict=True))

    def is_eligible(name: Name) -> bool:
        return not any(map(is_slower, seconds[name], seconds[baseline]))

    def product(name: Name) -> float:
        weight = ONNX_ADVANTAGE if name == "onnx" else 1.0
        return math.prod(weight * median(rounds) for rounds in seconds[name])

    return min(filter(is_eligible, seconds), key=product)


@contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
