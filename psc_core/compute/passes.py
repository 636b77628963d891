"""Run a truncated network over a data set, batch by batch, and yield its features.

Calibration and evaluation run a whole pipeline instead, in a loop over :func:`track_images`.
Progress goes to stderr: a bar on a terminal, log lines elsewhere.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from psc_core.compute import BATCH_IMAGES, MAX_MEMORY
from psc_core.compute.allocator import release_freed_memory
from psc_core.compute.device import autocast
from psc_core.compute.distributed import Reducer
from psc_core.data.dataset import Batch, ImageDataset
from psc_core.precision import Precision

Item = TypeVar("Item")
Value = TypeVar("Value")

MAX_CPU_BATCH = 64
"""Maximum batch size on a CPU, because the activations of more images leave the cache."""

LOG_SECONDS: Final = 30.0
"""Minimum time between two lines in a log, in seconds."""


@dataclass(frozen=True)
class Compute:
    """The device, precision, batch size and memory with which a fit computes features."""

    device: torch.device
    precision: Precision = "fp32"  # of the network
    batch_images: int = BATCH_IMAGES  # maximum batch size
    reducer: Reducer = field(default_factory=Reducer)  # this process among those that fit one model
    max_memory: int = MAX_MEMORY  # budget for the statistics of a stage and the features of a batch, bytes

    @property
    def batch_size(self) -> int:
        """The batch size: ``batch_images``, but at most :data:`MAX_CPU_BATCH` on a CPU."""
        return min(self.batch_images, MAX_CPU_BATCH) if self.device.type == "cpu" else self.batch_images


def passes(
    dataset: ImageDataset,
    compute: Compute,
    description: str,
    step: Callable[[Tensor], Value],
    *,
    order: Tensor | None = None,
) -> Iterator[tuple[Value, Batch]]:
    """Yield ``step(standardised images)`` with its batch, in inference mode, and show ``description`` with the
    progress.

    ``step`` is a function of float images (B, C, H, W) on the device; ``order`` is as in :meth:`ImageDataset.batches`.
    """
    release_freed_memory()
    for batch in track_images(dataset, compute, description, order):
        with torch.inference_mode():
            images = dataset.preprocess.standardise(batch.images.to(compute.device, non_blocking=True))
            with autocast(compute.device, compute.precision):
                value = step(images)
        yield value, batch


def track_images(
    dataset: ImageDataset, compute: Compute, description: str, order: Tensor | None = None
) -> Iterator[Batch]:
    """Yield the batches of ``dataset``, with a progress bar."""
    batches = dataset.batches(compute.batch_size, order=order)
    return track(batches, total=math.ceil(len(dataset) / compute.batch_size), description=description)


def track(items: Iterable[Item], *, total: int, description: str) -> Iterator[Item]:
    """Yield ``items`` and report how many of ``total`` are done, the rate, and the time left.

    There may be fewer: a search that ends early.  Instead of a bar, a file or pipe gets one line at the end and at most
    one every :data:`LOG_SECONDS`.
    """
    if sys.stderr.isatty():
        yield from tqdm(items, desc=description, total=total, dynamic_ncols=True)
        return
    began = last = time.monotonic()
    done = 0
    for done, item in enumerate(items, 1):
        yield item
        if (now := time.monotonic()) - last >= LOG_SECONDS and done < total:
            last = now
            _log(description, done, total, now - began)
    _log(description, done, done, time.monotonic() - began)


def _log(description: str, done: int, total: int, seconds: float) -> None:
    left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
    rate = done / max(seconds, 1e-9)
    print(f"{description} {done}/{total} ({rate:.1f}/s, {seconds:.0f} s{left})", file=sys.stderr, flush=True)
