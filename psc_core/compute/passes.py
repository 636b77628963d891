"""Run a truncated network over a data set, batch by batch: the only loop over images in fitting."""

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
"""Maximum batch size on a CPU.  With more images the activations leave the cache, and allocating them costs more than
the network (a Wide-ResNet took twice as long per image at 256)."""


@dataclass(frozen=True)
class Compute:
    """Where and how features are computed while fitting.

    Attributes:
        device: Compute device.
        precision: ``"fp32"`` or ``"bf16"``, of the network.
        batch_images: Maximum batch size.
    """

    device: torch.device
    precision: str = "fp32"
    batch_images: int = 256

    @property
    def batch_size(self) -> int:
        """Batch size: ``batch_images``, but at most :data:`MAXIMUM_CPU_BATCH` on a CPU."""
        return min(self.batch_images, MAXIMUM_CPU_BATCH) if self.device.type == "cpu" else self.batch_images


def passes(
    dataset: ImageDataset,
    compute: Compute,
    description: str,
    step: Callable[[Tensor], Value],
    *,
    order: Tensor | None = None,
) -> Iterator[tuple[Value, Batch]]:
    """Yield ``step(standardised images)`` and its batch, in inference mode.

    Args:
        dataset: Images to read.
        compute: Device, precision and batch size.
        description: Text of the progress bar.
        step: Function of float images (B, C, H, W) on the device.
        order: Positions in ``dataset`` in reading order, see :meth:`psc_core.data.dataset.ImageDataset.batches`.
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
    """The batches of ``dataset``, with a progress bar."""
    batches = dataset.batches(compute.batch_size, order=order)
    return track(batches, total=dataset.batch_count(compute.batch_size), description=description)
