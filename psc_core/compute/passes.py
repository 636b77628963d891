"""One pass of a truncated network over a data set: the only loop that fitting has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from psc_core.compute.progress import track
from psc_core.data.dataset import Batch, ImageDataset

Value = TypeVar("Value")

MAXIMUM_CPU_BATCH = 64
"""Images sent through a network at once on a CPU at most: of more, activations leave the cache, and allocating
them costs more than the network (a Wide-ResNet took twice as long an image at 256)."""


@dataclass(frozen=True)
class Compute:
    """Where and how features are computed while fitting.

    Attributes:
        device: Compute device.
        precision: ``"fp32"`` or ``"bf16"`` of the network.
        batch_images: Images a batch at most.
    """

    device: torch.device
    precision: str = "fp32"
    batch_images: int = 256

    @property
    def batch_size(self) -> int:
        """Images a batch: on a CPU at most :data:`MAXIMUM_CPU_BATCH`."""
        return min(self.batch_images, MAXIMUM_CPU_BATCH) if self.device.type == "cpu" else self.batch_images


def passes(
    dataset: ImageDataset,
    compute: Compute,
    description: str,
    step: Callable[[Tensor], Value],
    *,
    order: Tensor | None = None,
) -> Iterator[tuple[Value, Batch]]:
    """Yield ``step(standardised images)`` with its batch, batch by batch, under inference mode.

    Args:
        dataset: Images to stream.
        compute: Device, precision and batch size.
        description: What the progress line says.
        step: Maps float images (B, C, H, W) on the device to whatever the caller wants.
        order: Positions in ``dataset`` in the order to read them, see :meth:`ImageDataset.batches`.
    """
    batches = track_images(dataset, compute, description, order)
    autocast = torch.autocast(compute.device.type, torch.bfloat16, enabled=compute.precision == "bf16")
    for batch in batches:
        with torch.inference_mode():
            images = dataset.preprocess.normalise(batch.images.to(compute.device, non_blocking=True))
            with autocast:
                value = step(images)
        yield value, batch


def track_images(
    dataset: ImageDataset, compute: Compute, description: str, order: Tensor | None = None
) -> Iterator[Batch]:
    """The batches of ``dataset`` with a progress line that counts batches."""
    batches = dataset.batches(compute.batch_size, order=order)
    return track(batches, total=dataset.batch_count(compute.batch_size), description=description)
