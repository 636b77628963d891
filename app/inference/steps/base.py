"""The interface of a step, from ``uint8 (n, C, H, W)`` host images to packed ``float32 (n, S + K + G)`` host outputs.

Every step runs under ``torch.inference_mode`` and is used by one thread at a time.  The outputs of padding images are
never returned.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from app.inference.request import DeviceBatch, Images, RequestMode, Result
from psc_core.model.pipeline import MAP, Pipeline
from psc_core.network.onnx.body import keep_from_compiler
from psc_core.tasks.outputs import FloatArray


class TorchThreads(NamedTuple):
    """The numbers of threads that PyTorch uses on a CPU."""

    full: int  # the number of threads of a network that runs on the device thread
    quick: int  # the number of threads of a network that is quick enough for the event loop


class Step(Protocol):
    """A way to compute batches."""

    slots: int  # the number of batches that may be launched and not yet fetched

    def input(self, slot: int) -> Images:
        """Return the slot's host buffer (max_batch, C, H, W), which :meth:`launch` sends to the device."""

    def warm_up(self, is_wanted: Callable[[], bool] = ...) -> bool:
        """Run every shape once, so that no request pays for compilation or capture.

        Args:
            is_wanted: Returns whether anybody still waits for the step; asked before each shape.

        Returns:
            Whether the step is quick: a full batch takes less time on one thread than handing it to another.
        """

    def launch(self, slot: int, count: int) -> None:
        """Start to compute the first ``count`` images of the slot's buffer."""

    def done(self, slot: int) -> bool:
        """Return whether :meth:`fetch` would return without waiting."""

    def fetch(self, slot: int, count: int) -> FloatArray:
        """Wait for a launched batch and return its outputs, which the caller owns; device errors surface here."""

    def explain(self, images: Images, mode: RequestMode) -> Result:
        """Compute outputs with maps, explanations or both, as the mode asks, without a slot."""

    def release_memory(self) -> None:
        """Return cached device memory to the device after an allocation has failed."""


class CompiledNetwork:
    """A network whose forward pass is compiled, with one graph per shape; explanations are not compiled.

    PyTorch compiles only a few shapes unless the process allows more (:func:`app.runtime.allow_compiled_shapes`).
    """

    def __init__(self, network: Pipeline) -> None:
        keep_from_compiler(network)
        self._forward = torch.compile(network, dynamic=False)
        self.explain = network.explain
        self.forward_with_map = network.forward_with_map

    def __call__(self, images: Tensor, /) -> Tensor:
        outputs: Tensor = self._forward(images)
        return outputs


def always() -> bool:
    """Say that a step is wanted."""
    return True


def buckets_to(max_batch: int) -> tuple[int, ...]:
    """Return the batch sizes to warm up: 1, 2, 4, … below ``max_batch``, then ``max_batch``."""
    sizes = [1]
    while sizes[-1] * 2 < max_batch:
        sizes.append(sizes[-1] * 2)
    return (*sizes, max_batch) if max_batch > 1 else (1,)


def bucket_of(buckets: tuple[int, ...], count: int) -> int:
    """Return the smallest bucket that holds ``count`` images."""
    return next(size for size in buckets if size >= count)


def explain(network: Pipeline | CompiledNetwork, images: Tensor, mode: RequestMode) -> Result:
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
