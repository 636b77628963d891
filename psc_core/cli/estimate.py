"""``psc-fit --dry-run``: how long a fit and its report take, and how much memory and disk, from two fits on few images.

A fit on n training images, and validation images in proportion, takes a + b · n seconds: its stages are passes over the
images, and everything else costs the same for any n.  Two small fits give a and b.  A still smaller one goes before
them, because the first fit of a process also loads libraries.  Of a large fit the report is estimated too long, because
it looks at no more than 2,000 images of a set.
"""

from __future__ import annotations

import contextlib
import io
import math
import resource
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import nn

from psc_core.cli.job import Job
from psc_core.cli.run import run_stages
from psc_core.compute.passes import Compute, passes
from psc_core.compute.readable import only_readable
from psc_core.data.dataset import ImageDataset, balanced
from psc_core.fitting.checkpoint import Checkpoint
from psc_core.report.collect import collect_fit

SECONDS: Final = 60.0
"""Time that the two fits together may take, roughly."""

PASSES: Final = 8
"""Assumed cost of a small fit, fixed costs included, in passes over its training images."""

FIT_IMAGES: Final = (256, 4096)
"""Smallest and largest number of training images in the larger fit."""


@dataclass(frozen=True)
class Estimate:
    """The time, memory and disk space that a fit on all images would take."""

    images: int  # number of training images in the larger of the two fits
    seconds: float
    memory: int  # peak of this process, bytes
    device_memory: int  # peak on the GPU, bytes; 0 without one
    pixels: int  # decoded images on disk, bytes; 0 where none are kept
    features: int  # features of the last stage on disk, bytes

    def __str__(self) -> str:
        hours, minutes = divmod(round(self.seconds / 60), 60)
        took = f"{hours} h {minutes:02d} min" if hours else f"{minutes} min" if minutes > 1 else f"{self.seconds:.0f} s"
        parts = [f"about {took}", f"{self.memory / (1 << 30):.1f} GiB of memory"]
        if self.device_memory:
            parts.append(f"{self.device_memory / (1 << 30):.1f} GiB on the GPU")
        disk = {"decoded images": self.pixels, "features": self.features}
        parts += [f"{math.ceil(size / (1 << 20)):,} MiB of disk for {what}" for what, size in disk.items() if size]
        return (
            f"a fit on all images takes {', '.join(parts)} (from fits on up to {self.images} images; nothing written)"
        )


def estimate(job: Job, max_bad_images: int) -> Estimate:
    """Fit twice on a few images, print what the larger fit found, and extrapolate."""
    train, val, compute = job.data.train, job.data.val, job.compute
    if job.cache is not None and not job.cache.has_room(train, val):
        print(*job.cache.notes(train, val), sep="\n", flush=True)
        job = replace(job, cache=None)
    larger = fit_images(rate(job.network.net, train, compute, job.settings.seed, max_bad_images), train)
    smallest = min(larger, 4 * len(train.classes))
    sizes = (max(larger // 3, smallest), larger)
    with contextlib.redirect_stdout(io.StringIO()):
        timed_fit(job, smallest, max_bad_images)
        first, _ = timed_fit(job, sizes[0], max_bad_images)
    second, feature_bytes = timed_fit(job, larger, max_bad_images)
    return Estimate(
        larger,
        extrapolate(sizes, (first, second), len(train)),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
        torch.cuda.max_memory_allocated(compute.device) if compute.device.type == "cuda" else 0,
        0 if job.cache is None else job.cache.size(train, val),
        compute.reducer.world * round(feature_bytes * len(train) / larger),
    )


def timed_fit(job: Job, size: int, max_bad_images: int) -> tuple[float, int]:
    """Fit to ``size`` training images and the same fraction of the validation images.

    Returns:
        The seconds, and the bytes that its features took on disk.
    """
    data, net = job.data, job.network.net
    fraction, classes = size / len(data.train), len(data.train.classes)
    lenient = replace(job.settings, alpha=0.5, coverage=0.5)  # Rates that so few images can keep.
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="psc-dry-run-") as scratch:
        checkpoint = Checkpoint.of(Path(scratch) / "stages", {})
        few = data.fewer(size, max(round(len(data.val) * fraction), min(len(data.val), 4 * classes)))
        few, _ = few.cached(job.cache)
        few, left_out = few.readable(max_bad_images)
        print(*left_out, sep="\n", end="\n" * bool(left_out))
        _, projection, fitted = run_stages(net, replace(job, data=few, settings=lenient), "dry-run", {}, checkpoint)
        collect_fit(fitted.model, net, few, projection.report, job.compute, "")
    return time.perf_counter() - began, fitted.feature_bytes


def extrapolate(sizes: tuple[int, int], seconds: tuple[float, float], images: int) -> float:
    """Return the seconds for ``images`` on the line through two measurements.

    Where noise makes the line fall, half of the larger fit's time is assumed to be in proportion to its images.
    """
    slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0]) if sizes[1] > sizes[0] else 0.0
    if slope <= 0:
        slope = seconds[1] / sizes[1] / 2
    return seconds[1] + slope * max(0, images - sizes[1])


def rate(net: nn.Module, train: ImageDataset, compute: Compute, seed: int, max_bad_images: int) -> float:
    """Return the images per second through the network alone, decoding included."""
    few = only_readable(balanced(train, 2 * compute.batch_size, seed), max_bad_images)
    began = time.perf_counter()
    for _ in passes(few, compute, "one pass", net.to(compute.device)):
        pass
    return len(few) / max(time.perf_counter() - began, 1e-9)


def fit_images(images_per_second: float, train: ImageDataset) -> int:
    """Return the number of training images in the larger fit, so that both together take about :data:`SECONDS`."""
    affordable = round(SECONDS * images_per_second / PASSES)
    wanted = min(max(affordable, FIT_IMAGES[0], 12 * len(train.classes)), max(FIT_IMAGES[1], 12 * len(train.classes)))
    return min(wanted, len(train))
