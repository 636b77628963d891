"""A step that runs the network when its outputs are fetched, on any number of images."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final, cast

import torch

from app.inference.request import Images, RequestMode, Result
from app.inference.steps.base import CompiledNetwork, TorchThreads, always, bucket_of, buckets_to, explain
from psc_core.model.pipeline import Pipeline
from psc_core.tasks.outputs import FloatArray

QUICK_SECONDS: Final = 2e-3
"""A full batch that takes less time than this is computed sooner here than on another thread.

On another thread, PyTorch gives up the interpreter's lock around every operation and then waits for the event loop to
release it, so the dozens of operations of a small network take several times as long as they do alone.
"""


class EagerStep:
    """A step that runs the network when its outputs are fetched.

    Args:
        network: Computes packed outputs from a uint8 batch.
        shape: (channels, height, width) of an image.
        max_batch: The maximum number of images in a step.
        device: The device of the network.
        fixed_shapes: Whether to pad batches to buckets, for a compiled network; otherwise any size runs unpadded.
        threads: The numbers of threads on a CPU; see :func:`app.inference.steps.make_step`.
    """

    slots = 1

    def __init__(
        self,
        network: Pipeline | CompiledNetwork,
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

    def input(self, slot: int) -> Images:
        return self._buffer

    def warm_up(self, is_wanted: Callable[[], bool] = always) -> bool:
        for count in self._buckets:
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
        pass

    def done(self, slot: int) -> bool:
        return True

    @torch.inference_mode()
    def fetch(self, slot: int, count: int) -> FloatArray:
        size = bucket_of(self._buckets, count) if self._fixed_shapes else count
        # PyTorch keeps this number for each calling thread, and warm-up may have run on another one.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        packed = self._network(self._host[:size].to(self._device))
        return cast(FloatArray, packed[:count].float().cpu().numpy())

    @torch.inference_mode()
    def explain(self, images: Images, mode: RequestMode) -> Result:
        return explain(self._network, torch.from_numpy(images).to(self._device), mode)

    def release_memory(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
