"""A step that replays captured CUDA graphs, one per bucket; batches are padded, and nothing is allocated.

A batch is one copy from the slot's pinned host buffer to the device, one replay and one copy back.  The host may fill
and launch the next slot while the device works on this one.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Final, cast

import torch
from torch import Tensor

from app.inference.request import Images, RequestMode, Result
from app.inference.steps.base import CompiledNetwork, always, bucket_of, buckets_to, explain
from psc_core.model.pipeline import Pipeline
from psc_core.tasks.outputs import FloatArray

_IDLE_STREAMS: Final[dict[torch.device, list[torch.cuda.Stream]]] = defaultdict(list)
"""The streams of steps that are gone, for reuse.

PyTorch has a pool of 32 streams and then hands out the same ones again, which other models may be using."""


class GraphStep:
    """A step that replays captured CUDA graphs.

    Args:
        network: Computes packed outputs from a uint8 batch on ``device``.
        shape: (channels, height, width) of an image.
        max_batch: The maximum number of images in a step.
        device: A CUDA device.
    """

    slots = 2

    def __init__(
        self, network: Pipeline | CompiledNetwork, shape: tuple[int, int, int], *, max_batch: int, device: torch.device
    ) -> None:
        self._network = network
        self._buckets = buckets_to(max_batch)
        self._host_images = [torch.zeros((max_batch, *shape), dtype=torch.uint8).pin_memory() for _ in range(2)]
        self._buffers: list[Images] = [images.numpy() for images in self._host_images]
        self._images = torch.zeros((max_batch, *shape), dtype=torch.uint8, device=device)
        self._device = self._images.device  # With its index, which set_device needs.
        idle = _IDLE_STREAMS[self._device]
        self._stream = idle.pop() if idle else torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        weakref.finalize(self, idle.append, self._stream)
        self._events = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._host_outputs: list[Tensor] = []

    def input(self, slot: int) -> Images:
        return self._buffers[slot]

    @torch.inference_mode()
    def warm_up(self, is_wanted: Callable[[], bool] = always) -> bool:
        torch.cuda.set_device(self._device)
        pool = torch.cuda.graph_pool_handle()
        # The largest first: all graphs share a pool, and the smaller ones fit into the memory of the largest.
        for count in reversed(self._buckets):
            if not is_wanted():
                return False
            images = self._images[:count]
            # Libraries choose algorithms and allocate workspaces in the first runs, which a capture must not contain.
            with torch.cuda.stream(self._stream):
                for _ in range(3):
                    self._network(images)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            # By default, an allocation on any thread, such as a running model's, would break the capture.
            with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
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
