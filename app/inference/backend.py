"""Choose the backend of a model by measuring, on the machine that serves and before the first request.

Measuring takes seconds, so the choice is cached beside the exported networks.
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
from psc_core.model import FittedModel
from psc_core.network.load import cache_file, read_checked, write_checked
from psc_core.network.onnx import INSTALLED
from psc_core.pipeline import Pipeline, available_backends, pipeline_on
from psc_core.settings import Backend

logger = logging.getLogger("psc.backend")

Name = TypeVar("Name", bound=str)
Seconds = list[float]  # the times of one batch, round by round
# A backend that is slower than the original network by this factor, in every round of some batch size, is not used.
SLOWER_BY: Final = 1.03
# ONNX Runtime's times are multiplied by this factor. The measurement runs alone and misses what PyTorch loses in a
# busy service: it waits for the interpreter's lock around each operation, and its threads wait for the one whose core
# is decoding an image.
ONNX_ADVANTAGE: Final = 0.9
_ROUNDS: Final = 10
_SIZE_SECONDS: Final = 0.5  # the time after which no further round of a batch size begins; there are at least two
_LONG_SECONDS: Final = 0.25  # if a batch takes longer, larger ones are not measured: their time per image is the same


def choose_backend(
    model: FittedModel, wanted: Backend | Literal["auto"], *, max_batch: int, threads: int
) -> tuple[Backend, Pipeline]:
    """Return the name of a backend and the model's pipeline on it."""
    names = available_backends(model)
    if wanted == "folded" and wanted in names:
        return wanted, model.pipeline
    if wanted != "auto" and (len(names) > 1 or names == (wanted,)):
        return wanted, pipeline_on(model, wanted)
    if wanted != "auto":
        reason = (
            "a bundle with an ONNX graph runs only in ONNX Runtime"
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
    # A busy neighbour on this machine slows the median, but hardly each network's quickest round.  A choice on which
    # both disagree may be the neighbour's doing, and is not cached.
    undisturbed = {name: [[min(rounds)] for rounds in times] for name, times in seconds.items()}
    if kept and fastest(undisturbed, "plain") == chosen:
        write_checked(kept, chosen.encode())
    return chosen, pipelines[chosen]


def _kept(model: FittedModel, names: Sequence[Backend], *, max_batch: int, threads: int) -> Path | None:
    """Return the path of a cached choice, whose name depends on bundle, settings, versions and processor."""
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
    """Return each network's times on each batch, seconds.

    The networks take turns in every round, so that a disturbance of the machine affects all of them.
    """
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
    """Return the name with the least product of median times over batch sizes.

    :data:`SLOWER_BY` says which are left out, :data:`ONNX_ADVANTAGE` how ONNX Runtime's times are weighted.
    """

    def is_slower(times: Seconds, base: Seconds) -> bool:
        return all(mine > SLOWER_BY * other for mine, other in zip(times, base, strict=True))

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
