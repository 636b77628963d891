"""Run batches on the device, from ``uint8 (n, C, H, W)`` host images to packed ``float32 (n, S + K + G)`` host outputs.

Every step runs under ``torch.inference_mode`` and is used by one thread at a time.  The outputs of padding images are
never returned.  Which backend a step uses is measured on the machine that serves; that takes seconds, so a model serves
on the folded network meanwhile, and the choice is cached beside the exported networks.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from app.inference.batcher import DeviceBatch, Images, RequestMode, Result
from psc_core.compute import side_streams
from psc_core.errors import NetworkError
from psc_core.model import FittedModel
from psc_core.network.load import cache_file, read_checked, write_checked
from psc_core.network.onnx import INSTALLED, keep_from_compiler
from psc_core.pipeline import MAP, Pipeline, available_backends, pipeline_on
from psc_core.settings import Backend
from psc_core.tasks.base import FloatArray

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


class Chosen(NamedTuple):
    """A backend, the model's pipeline on it, and whether they are final."""

    backend: Backend
    pipeline: Pipeline
    is_final: bool = True  # whether no other backend may turn out to be faster


def choose_backend(
    model: FittedModel, wanted: Backend | Literal["auto"], *, max_batch: int, threads: int, may_measure: bool = True
) -> Chosen:
    """Return the wanted backend, the only one, or the fastest; before it is measured, one that needs no preparation."""
    names = available_backends(model)
    if wanted == "folded" and wanted in names:
        return Chosen(wanted, model.pipeline)
    if wanted != "auto" and (len(names) > 1 or names == (wanted,)):
        return Chosen(wanted, pipeline_on(model, wanted))
    if wanted != "auto":
        reason = (
            "a bundle with an ONNX graph runs only in ONNX Runtime"
            if model.backbone.onnx is not None
            else "only a traced float32 network on a CPU has a choice of backends"
        )
        logger.warning("backend not used", extra={"backend": wanted, "reason": reason})
    kept = _kept(model, names, max_batch=max_batch, threads=threads)
    before = ((kept and read_checked(kept)) or b"").decode()
    if not may_measure and len(names) > 1 and before not in names:
        return Chosen("folded", model.pipeline, is_final=False)
    pipelines: dict[Backend, Pipeline] = {}
    for name in [name for name in names if name == before] or names:
        try:
            pipelines[name] = pipeline_on(model, name)
        except NetworkError as error:
            logger.warning("backend not used", extra={"backend": name, "reason": str(error)})
    if len(pipelines) <= 1:
        return Chosen(*next(iter(pipelines.items()), ("folded", model.pipeline)))
    images = torch.zeros((max_batch, *model.preprocess.shape), dtype=torch.uint8)
    before_measuring = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seconds = measure(pipelines, [images[:size] for size in sorted({1, min(8, max_batch), max_batch})])
    finally:
        torch.set_num_threads(before_measuring)
    chosen = fastest(seconds, "plain")
    milliseconds = {name: [round(1e3 * median(rounds), 2) for rounds in times] for name, times in seconds.items()}
    logger.info("backend chosen", extra={"backend": chosen, "milliseconds": milliseconds})
    # A busy neighbour on this machine slows the median, but hardly each network's quickest round.  A choice on which
    # both disagree may be the neighbour's doing, and is not cached.
    undisturbed = {name: [[min(rounds)] for rounds in times] for name, times in seconds.items()}
    if kept and fastest(undisturbed, "plain") == chosen:
        write_checked(kept, chosen.encode())
    return Chosen(chosen, pipelines[chosen])


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


class TorchThreads(NamedTuple):
    """The numbers of threads that PyTorch uses on a CPU."""

    full: int  # the number of threads of a batch that runs alone; two at once have half of them each
    quick: int  # the number of threads of a network that is quick enough for the event loop


def buckets_to(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to warm up: 1, 2, 4, … below ``max_batch``, then ``max_batch``."""
    return (*(1 << power for power in range((max_batch - 1).bit_length())), max_batch)


def bucket_of(buckets: tuple[int, ...], count: int) -> int:
    """Return the smallest bucket that holds ``count`` images."""
    return next(size for size in buckets if size >= count)


def explain(network: Pipeline, images: Tensor, mode: RequestMode) -> Result:
    """Compute the outputs of a batch on the network's device, with maps, explanations or both, as the mode asks."""
    if mode is RequestMode.MAP:
        packed, grey = network.forward_with_map(images)
        explanation = {MAP: grey}
    else:
        packed, explanation = network.explain(images, with_map=mode.has_map)
    arrays: dict[str, Any] = {name: value.cpu().numpy() for name, value in explanation.items()}
    return Result(packed.float().cpu().numpy(), arrays)


def run_batch(step: Step, batch: DeviceBatch) -> Result:
    """Compute a batch and return its result, using slot 0."""
    if batch.mode is not RequestMode.PREDICT:
        images = np.empty((batch.size, *step.input(0).shape[1:]), np.uint8)
        batch.copy_images(images)
        return step.explain(images, batch.mode)
    batch.copy_images(step.input(0))
    step.launch(0, batch.size)
    return Result(step.fetch(0, batch.size))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a step failed for lack of memory, on the device or the host.

    PyTorch's CPU allocator has no exception of its own; it raises a RuntimeError that only its text tells apart.
    """
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)
    )


# A full batch that takes less time than this is computed sooner here than on another thread. On another thread,
# PyTorch gives up the interpreter's lock around every operation and then waits for the event loop to release it, so
# the dozens of operations of a small network take several times as long as they do alone.
QUICK_SECONDS: Final = 2e-3


class EagerStep:
    """A step that runs the network when its outputs are fetched; with ``fixed_shapes``, it pads batches to buckets."""

    slots = 1  # the number of batches that may be launched and not yet fetched
    is_alone = True  # whether no other step of the network runs meanwhile

    def __init__(
        self,
        network: Pipeline,
        shape: tuple[int, int, int],
        *,
        max_batch: int,
        device: torch.device,
        fixed_shapes: bool = False,
        threads: TorchThreads | None = None,
    ) -> None:
        self._network = network
        self._device = device
        self._host = torch.zeros((max_batch, *shape), dtype=torch.uint8)
        self._buffer: Images = self._host.numpy()
        self._buckets = buckets_to(max_batch)
        self._fixed_shapes = fixed_shapes
        self._threads, self._quick_threads = threads or TorchThreads(torch.get_num_threads(), 1)

    def beside(self) -> EagerStep | None:
        """Return another step of the warm network, to run at the same time; None if that would gain nothing.

        Two batches on one core each are done sooner than one after the other on both: no core waits for another.
        """
        if self._device.type != "cpu" or self._fixed_shapes or self._threads < 2 or self._network.has_hooks:
            return None
        other = copy(self)
        other.is_alone = False
        other._host = torch.zeros_like(self._host)
        other._buffer = other._host.numpy()
        return other

    def input(self, slot: int) -> Images:
        """Return the slot's host buffer (max_batch, C, H, W), which :meth:`launch` sends to the device."""
        return self._buffer

    def warm_up(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        """Run every fixed shape, or the least and the largest, so that no request pays for compilation or capture.

        Return whether the step is quick: a full batch takes less time on one thread than handing it to another.
        """
        # Without fixed shapes, what the first batch of a size costs is lost in the time of the batch.
        for count in self._buckets if self._fixed_shapes else sorted({1, self._buckets[-1]}):
            if not is_wanted():
                return False
            self.fetch(0, count)
        if self._device.type != "cpu":
            return False
        full, self._threads = self._threads, self._quick_threads
        quick = all(self._is_quick(count) for count in (1, self._buckets[-1]))
        self._threads = self._quick_threads if quick else full
        return quick

    def _is_quick(self, count: int) -> bool:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.fetch(0, count)
            seconds.append(time.perf_counter() - began)
        return min(seconds) < QUICK_SECONDS

    def launch(self, slot: int, count: int) -> None:
        """Start to compute the first ``count`` images of the slot's buffer."""

    def done(self, slot: int) -> bool:
        """Return whether :meth:`fetch` would return without waiting."""
        return True

    @torch.inference_mode()
    def fetch(self, slot: int, count: int) -> FloatArray:
        """Wait for a launched batch and return its outputs, which the caller owns; device errors surface here."""
        size = bucket_of(self._buckets, count) if self._fixed_shapes else count
        # PyTorch keeps this number for each calling thread, and warm-up may have run on another one.
        threads = self._threads if self.is_alone else max(1, self._threads // 2)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        packed = self._network(self._host[:size].to(self._device))
        return cast(FloatArray, packed[:count].float().cpu().numpy())

    @torch.inference_mode()
    def explain(self, images: Images, mode: RequestMode) -> Result:
        """Compute outputs with maps, explanations or both, as the mode asks, without a slot."""
        return explain(self._network, torch.from_numpy(images).to(self._device), mode)

    def release_memory(self) -> None:
        """Return cached device memory to the device after an allocation has failed."""
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


# The streams of steps that are gone, for reuse. PyTorch has a pool of 32 streams and then hands out the same ones
# again, which other models may be using.
_IDLE_STREAMS: Final[dict[torch.device, list[torch.cuda.Stream]]] = defaultdict(list)


class GraphStep:
    """A step that replays captured CUDA graphs, one per bucket; batches are padded, and nothing is allocated.

    A batch is one copy from the slot's pinned host buffer to the device, one replay and one copy back.  The host may
    fill and launch the next slot while the device works on this one.  The methods are those of :class:`EagerStep`.
    """

    slots = 2
    is_alone = True

    def __init__(self, network: Pipeline, shape: tuple[int, int, int], *, max_batch: int, device: torch.device) -> None:
        self._network = network
        self._buckets = buckets_to(max_batch)
        self._host_images = [torch.zeros((max_batch, *shape), dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._buffers: list[Images] = [images.numpy() for images in self._host_images]
        self._images = torch.zeros((max_batch, *shape), dtype=torch.uint8, device=device)
        self._device = self._images.device  # With its index, which set_device needs.
        idle = _IDLE_STREAMS[self._device]
        streams = [idle.pop() if idle else torch.cuda.Stream(self._device) for _ in range(3)]  # type: ignore[no-untyped-call]
        weakref.finalize(self, idle.extend, streams)
        self._stream, *self._sides = streams
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._host_outputs: list[Tensor] = []

    def beside(self) -> None:
        return None

    def input(self, slot: int) -> Images:
        return self._buffers[slot]

    @torch.inference_mode()
    def warm_up(self, is_wanted: Callable[[], bool] = lambda: True) -> bool:
        torch.cuda.set_device(self._device)
        pool = torch.cuda.graph_pool_handle()
        # The largest first: all graphs share a pool, and the smaller ones fit into the memory of the largest.
        for count in reversed(self._buckets):
            if not is_wanted():
                return False
            images = self._images[:count]
            # Libraries choose algorithms and allocate workspaces in the first runs, which a capture must not contain.
            with torch.cuda.stream(self._stream), side_streams(self._sides):
                for _ in range(3):
                    self._network(images)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # By default, an allocation on any thread, such as a running model's, would break the capture.
            capture = torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local")
            with capture, side_streams(self._sides):
                packed = self._network(images).float()
            self._graphs[count] = (graph, packed)
        largest = self._graphs[self._buckets[-1]][1]
        self._host_outputs = [torch.zeros(largest.shape, dtype=torch.float32).pin_memory() for _ in range(2)]
        return False

    @torch.inference_mode()
    def launch(self, slot: int, count: int) -> None:
        graph, packed = self._graphs[bucket_of(self._buckets, count)]
        with torch.cuda.stream(self._stream):
            self._images[:count].copy_(self._host_images[slot][:count], non_blocking=True)
            graph.replay()
            self._host_outputs[slot][:count].copy_(packed[:count], non_blocking=True)
            self._events[slot].record(self._stream)

    def done(self, slot: int) -> bool:
        return bool(self._events[slot].query())  # type: ignore[no-untyped-call]

    def fetch(self, slot: int, count: int) -> FloatArray:
        self._events[slot].synchronize()
        return cast(FloatArray, self._host_outputs[slot][:count].numpy().copy())

    @torch.inference_mode()
    def explain(self, images: Images, mode: RequestMode) -> Result:
        with torch.cuda.stream(self._stream):
            return explain(self._network, torch.from_numpy(images).to(self._device), mode)

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


Step = EagerStep | GraphStep  # a way to compute batches


def make_step(
    network: Pipeline,
    shape: tuple[int, int, int],
    *,
    max_batch: int,
    device: torch.device,
    compiled: bool = False,
    threads: TorchThreads | None = None,
) -> Step:
    """Return the fastest step for ``device``; if compiled, the forward pass has a graph per shape."""
    run = network
    if compiled:  # Only a few shapes unless the process allows more (:func:`app.main.allow_compiled_shapes`).
        keep_from_compiler(network)
        run = cast(Pipeline, torch.compile(network, dynamic=False))
    # A network that is not traced may let the host decide how to go on, which a captured graph cannot.
    if device.type == "cuda" and network.is_traced:
        return GraphStep(run, shape, max_batch=max_batch, device=device)
    return EagerStep(run, shape, max_batch=max_batch, device=device, fixed_shapes=compiled, threads=threads)
