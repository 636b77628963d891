"""One device step: ``uint8 (n, C, H, W)`` host images in, packed ``float32 (n, SCORES + K)`` host rows out.

Two kinds behind one interface.  :class:`EagerStep` runs the network when the rows are fetched, on any number
of images.  :class:`GraphStep` (CUDA) replays one captured CUDA graph per bucket of images (1, 2, 4, …, max),
padded: a pinned host buffer per slot, one copy to the device, one replay, one copy back, nothing allocated;
the host may fill and launch the next slot while the device works on this one.

Stale rows in the padding are never returned.  Everything runs under ``torch.inference_mode``; one thread at a time
uses a step.
"""

from __future__ import annotations

import time
import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from app.lanes import Lanes
from psc_core.model.decision import Rows

Images = npt.NDArray[np.uint8]

QUICK_SECONDS: Final = 2e-3
"""A full batch below this is quicker than handing it to another thread.

PyTorch lets go of the interpreter's lock around every operation and gets it back when the event loop is
willing: the dozens of operations of a small network then take several times as long as they do alone.
"""


class Network(Protocol):
    """What a step needs of ``psc_core.model.pipeline.Pipeline``."""

    @property
    def concurrent(self) -> bool:
        """Whether several threads may call it at once."""

    def __call__(self, images: Tensor, /) -> Tensor: ...

    def explain(self, images: Tensor, /) -> tuple[Tensor, Mapping[str, Tensor]]: ...


class Step(Protocol):
    """How batches are computed; one thread at a time calls these methods."""

    slots: int
    """Batches that may be launched and not yet fetched."""

    quick: bool
    """Whether, once warm, a full batch takes less than :data:`QUICK_SECONDS` of one thread."""

    def input(self, slot: int) -> Images:
        """The host buffer (max, C, H, W) that :meth:`launch` sends."""

    def warm_up(self) -> None:
        """Run every shape once, so that no request pays for compilation or capture."""

    def launch(self, slot: int, count: int) -> None:
        """Start on the first ``count`` images of the slot's buffer."""

    def done(self, slot: int) -> bool:
        """Whether :meth:`fetch` would not wait."""

    def fetch(self, slot: int, count: int) -> Rows:
        """Rows of what was launched; the caller owns the array.  Device errors surface here."""

    def explain(self, images: Images) -> tuple[Rows, dict[str, npt.NDArray[Any]]]:
        """Rows and, by name, the arrays of ``Pipeline.explain``, images first."""

    def release_memory(self) -> None:
        """Give cached device memory back after an allocation failed."""


def make_step(
    network: Network,
    shape: tuple[int, int, int],
    *,
    max_batch: int,
    device: torch.device,
    compiled: bool,
    threads: int | None = None,
    usual_threads: int | None = None,
) -> Step:
    """The fastest step for ``device``.

    Args:
        network: On ``device`` already.
        shape: (channels, height, width).
        max_batch: Most images in a step.
        device: Where the network is.
        compiled: Run it through ``torch.compile``.
        threads: Of PyTorch on a CPU; ``None`` takes the usual ones, or one where that is quick.
        usual_threads: PyTorch's choice; ``None`` asks it, which a quick step on the same thread has changed.
    """
    run: Network = cast(Network, _Compiled(network)) if compiled else network
    if device.type == "cuda" and network.concurrent:  # One cut by hooks may ask the host what to do next.
        return GraphStep(run, shape, max_batch=max_batch, device=device)
    return EagerStep(
        run,
        shape,
        max_batch=max_batch,
        device=device,
        fixed_shapes=compiled,
        threads=threads,
        usual_threads=usual_threads,
    )


def buckets_to(max_batch: int) -> tuple[int, ...]:
    """1, 2, 4, … below ``max_batch``, then ``max_batch``."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch:
        sizes.append(sizes[-1] * 2)
    return (*sizes, max_batch) if max_batch > 1 else (1,)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a step failed for lack of memory, on the device or the host."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )


_MOST_SHAPES: Final = 1 << 16
"""Compiled in one process: buckets of all models, and of every reload."""


class _Compiled:
    """The network with its forward compiled, one graph per shape; ``explain`` stays as it is."""

    concurrent = False

    def __init__(self, network: Network) -> None:
        dynamo = torch._dynamo.config  # Its limits, 8 and 256, are for what is compiled again by mistake.
        dynamo.recompile_limit = dynamo.accumulated_recompile_limit = _MOST_SHAPES
        self._forward = torch.compile(network, dynamic=False)
        self.explain = network.explain

    def __call__(self, images: Tensor, /) -> Tensor:
        return self._forward(images)


class EagerStep:
    """Runs the network when fetched, on a CPU a large batch in parts (:mod:`app.lanes`).

    Args:
        network: uint8 batch to packed rows.
        shape: (channels, height, width).
        max_batch: Most images in a step.
        device: Where the network is.
        fixed_shapes: Pad to buckets (for a compiled network); else any count runs as it is.
        threads, usual_threads: See :func:`make_step`.
    """

    slots = 1
    quick = False

    def __init__(
        self,
        network: Network,
        shape: tuple[int, int, int],
        *,
        max_batch: int,
        device: torch.device,
        fixed_shapes: bool = False,
        threads: int | None = None,
        usual_threads: int | None = None,
    ) -> None:
        self._network = network
        self._device = device
        self._host = torch.zeros((max_batch, *shape), dtype=torch.uint8)
        self._buffer: Images = self._host.numpy()
        self._buckets = buckets_to(max_batch)
        self._fixed_shapes = fixed_shapes
        self._given_threads = threads
        self._lanes = Lanes(
            network,
            threads or usual_threads or torch.get_num_threads(),
            concurrent=device.type == "cpu" and network.concurrent,
        )

    def input(self, slot: int) -> Images:
        return self._buffer

    def warm_up(self) -> None:
        for count in self._buckets:
            self.fetch(0, count)
        if self._device.type == "cpu":
            usual, self._lanes.threads = self._lanes.threads, self._given_threads or 1
            self.quick = all(self._is_quick(count) for count in (1, self._buckets[-1]))
            self._lanes.threads = self._lanes.threads if self.quick else usual

    def _is_quick(self, count: int) -> bool:
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            self.fetch(0, count)
            seconds.append(time.perf_counter() - began)
        return min(seconds) < QUICK_SECONDS

    def launch(self, slot: int, count: int) -> None:
        pass

    def done(self, slot: int) -> bool:
        return True

    @torch.inference_mode()
    def fetch(self, slot: int, count: int) -> Rows:
        size = _bucket(self._buckets, count) if self._fixed_shapes else count
        rows = self._lanes(self._host[:size].to(self._device))
        return cast(Rows, rows[:count].float().cpu().numpy())

    @torch.inference_mode()
    def explain(self, images: Images) -> tuple[Rows, dict[str, npt.NDArray[Any]]]:
        return _explain(self._network, torch.from_numpy(images).to(self._device))

    def release_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


_IDLE_STREAMS: Final[dict[torch.device, list[torch.cuda.Stream]]] = defaultdict(list)
"""Of steps that are gone; CUDA hands out 32, and then those again that other models are using."""


class GraphStep:
    """Replays captured CUDA graphs; see the module."""

    slots = 2
    quick = False

    def __init__(self, network: Network, shape: tuple[int, int, int], *, max_batch: int, device: torch.device) -> None:
        self._network = network
        self._buckets = buckets_to(max_batch)
        self._hosts = [torch.zeros((max_batch, *shape), dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._inputs: list[Images] = [host.numpy() for host in self._hosts]
        self._images = torch.zeros((max_batch, *shape), dtype=torch.uint8, device=device)
        self._device = self._images.device  # With its index.
        idle = _IDLE_STREAMS[self._device]
        self._stream = idle.pop() if idle else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, idle.append, self._stream)
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._rows: list[Tensor] = []

    def input(self, slot: int) -> Images:
        return self._inputs[slot]

    @torch.inference_mode()
    def warm_up(self) -> None:
        torch.cuda.set_device(self._device)
        pool = torch.cuda.graph_pool_handle()
        for count in reversed(self._buckets):
            images = self._images[:count]
            with torch.cuda.stream(self._stream):
                for _ in range(3):
                    self._network(images)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
                rows = self._network(images).float()
            self._graphs[count] = (graph, rows)
        largest = self._graphs[self._buckets[-1]][1]
        self._rows = [torch.zeros(largest.shape, dtype=torch.float32).pin_memory() for _ in range(2)]

    @torch.inference_mode()
    def launch(self, slot: int, count: int) -> None:
        graph, rows = self._graphs[_bucket(self._buckets, count)]
        with torch.cuda.stream(self._stream):
            self._images[:count].copy_(self._hosts[slot][:count], non_blocking=True)
            graph.replay()
            self._rows[slot][:count].copy_(rows[:count], non_blocking=True)
            self._events[slot].record(self._stream)

    def done(self, slot: int) -> bool:
        return bool(self._events[slot].query())  # type: ignore[no-untyped-call]

    def fetch(self, slot: int, count: int) -> Rows:
        self._events[slot].synchronize()
        return cast(Rows, self._rows[slot][:count].numpy().copy())

    @torch.inference_mode()
    def explain(self, images: Images) -> tuple[Rows, dict[str, npt.NDArray[Any]]]:
        with torch.cuda.stream(self._stream):
            return _explain(self._network, torch.from_numpy(images).to(self._device))

    def release_memory(self) -> None:
        torch.cuda.empty_cache()


def _bucket(buckets: tuple[int, ...], count: int) -> int:
    return next(size for size in buckets if size >= count)


def _explain(network: Network, images: Tensor) -> tuple[Rows, dict[str, npt.NDArray[Any]]]:
    rows, explanation = network.explain(images)
    arrays = {name: value.cpu().numpy() for name, value in explanation.items()}
    return cast(Rows, rows.float().cpu().numpy()), arrays


@dataclass(frozen=True)
class GpuUsage:
    """Memory in bytes by kind, and the share of time the GPU was busy; empty on a CPU."""

    memory_bytes: Mapping[str, int]
    utilisation: float | None


def gpu_usage(device: torch.device) -> GpuUsage:
    """What the metrics show of a GPU; utilisation needs the NVML bindings."""
    if device.type != "cuda":
        return GpuUsage({}, None)
    free, total = torch.cuda.mem_get_info(device)
    memory = {"used": total - free, "total": total, "allocated": torch.cuda.memory_allocated(device)}
    try:
        return GpuUsage(memory, torch.cuda.utilization(device) / 100.0)
    except Exception:  # No bindings, no library, or a part of a GPU: NVML has errors of its own.
        return GpuUsage(memory, None)
