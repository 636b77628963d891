"""The device, number format and processes of a computation, and the one loop over a data set.

A program may set a default type or device, or call from within autocast or inference mode, and a package may do so when
it is imported.  Every public function that computes runs in :func:`own_state`, so that its numbers are the calibrated
ones.

Under ``torchrun`` every process runs the same program, and each reads its shard of the images.  A nearest-class-mean
classifier takes two passes: class statistics of features, then distances to the class means.  Features are split into
ranges of columns, over which scatter and distances add up, so that the class means of wide features fit into memory.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor
from torch import distributed as dist
from tqdm import tqdm

from psc_core.allocator import release_freed_memory
from psc_core.data.dataset import Batch, ImageDataset, stable_order
from psc_core.errors import UsageError
from psc_core.features import KeptLayers
from psc_core.linalg import ClassScatter, class_pairs, distances_from
from psc_core.settings import BATCH_IMAGES, MAX_MEMORY, Precision


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device ``"auto"`` (CUDA if available, else the CPU), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    On CUDA this turns off TF32 for the process: cuDNN's convolutions use it by default, and a bundle fitted on one
    device would not give the same numbers on another.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = UsageError(f"expected a device auto, cpu, cuda or cuda:N, got {name!r}")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"no CUDA device {name!r}, this machine has {torch.cuda.device_count()}; use --device cpu or auto"
            )
        backends: Any = torch.backends
        backends.cudnn.allow_tf32 = backends.cuda.matmul.allow_tf32 = False
        # These flags leave what a program has set by the newer ones, and cannot be read where the two differ.
        for operation in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
            operation.fp32_precision = "ieee"
    return device


_SIDES: ContextVar[Sequence[torch.cuda.Stream]] = ContextVar("sides", default=())


@contextmanager
def side_streams(streams: Sequence[Any]) -> Iterator[None]:
    """Let :func:`together` use these streams within the block; nobody else may use them meanwhile."""
    before = _SIDES.set(streams)
    try:
        yield
    finally:
        _SIDES.reset(before)


def together(first: Callable[[], Any], *others: Callable[[], Any]) -> tuple[Any, ...]:
    """Return the results of calls that do not need each other, each on a stream of its own if there are enough.

    The tail of a network is dozens of kernels that each take less time than their start, on a part of the GPU.
    """
    sides = _SIDES.get()[: len(others)]
    if len(sides) < len(others):
        return first(), *(call() for call in others)
    here = torch.cuda.current_stream()
    results = []
    for stream, call in zip(sides, others, strict=True):
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            results.append(call())
    found = first()
    for stream in sides:
        here.wait_stream(stream)
    return found, *results


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a network runs; everything after the network runs outside of it, in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def own_state() -> Iterator[None]:
    """Run a block or, as a decorator, a function in float32, on the CPU unless a device is named, without autocast and
    outside of inference mode; then restore the caller's state.
    """
    with ExitStack() as entered:
        entered.enter_context(_DEFAULT_TYPE)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                entered.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            entered.enter_context(torch.device("cpu"))
        entered.enter_context(torch.inference_mode(False))
        entered.enter_context(torch.enable_grad())
        yield


class _DefaultType:
    """Makes float32 the default type, which all threads of a process share, as long as one of them is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._outside = torch.float32

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._outside = torch.get_default_dtype()
            self._inside += 1
            self._set(torch.float32)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            self._set(torch.float32 if self._inside else self._outside)  # An import inside may have set another.

    def _set(self, dtype: torch.dtype) -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


_DEFAULT_TYPE = _DefaultType()


def launched_process() -> tuple[int, int, int | None]:
    """Return rank and number of the processes that ``torchrun`` started, by default 0 of 1, and this one's GPU.

    Processes that outnumber the GPUs of a machine share them; without GPUs it is None.
    """
    names = (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0))
    rank, world, local_rank = (int(os.environ.get(name, alone)) for name, alone in names)
    gpus = torch.cuda.device_count()
    return rank, world, local_rank % gpus if gpus else None


def join_processes() -> tuple[int, int]:
    """Join the processes that ``torchrun`` started, and return this one's rank, from 0, and their number.

    They sum CPU tensors by Gloo and CUDA tensors by NCCL, or by Gloo too where some share a GPU, which NCCL refuses.
    Each process leaves the group when the program ends.
    """
    if "WORLD_SIZE" not in os.environ:
        raise UsageError(
            "--distributed needs torchrun, WORLD_SIZE is not set; run "
            "torchrun --nproc-per-node N -m psc_core.cli.fit … --distributed"
        )
    if (gpu := launched_process()[2]) is not None:
        torch.cuda.set_device(gpu)
    gpus = torch.cuda.device_count()
    dist.init_process_group("gloo" if 0 < gpus < int(os.environ.get("LOCAL_WORLD_SIZE", 1)) else None)
    atexit.register(dist.destroy_process_group)
    return dist.get_rank(), dist.get_world_size()


@dataclass
class Progress:
    """How far a fit is: its steps, and the images that the network has seen."""

    names: tuple[str, ...]
    at: str = ""
    images: int = 0
    began: float = field(default_factory=time.monotonic)

    def text(self, training_images: int) -> str:
        """Say how long all took."""
        minutes, seconds = divmod(round(time.monotonic() - self.began), 60)
        took = f"{minutes} min {seconds} s" if minutes else f"{seconds} s"
        return f"took {took}; the network ran {self.images / training_images:.1f} times over the training images"


FIT_STEPS: Final = ("original network", "layers", "projection", "features", "checks", "calibration", "report")
_PROGRESS: ContextVar[Progress | None] = ContextVar("progress", default=None)


@contextmanager
def steps(names: Sequence[str]) -> Iterator[Progress]:
    """Number what :func:`track` reports within the block by these steps, which :func:`begin` begins."""
    token = _PROGRESS.set(progress := Progress(tuple(names)))
    try:
        yield progress
    finally:
        _PROGRESS.reset(token)


def begin(name: str) -> None:
    if (progress := _PROGRESS.get()) is not None and name in progress.names:
        progress.at = name


def count_images(images: int) -> None:
    """Count images that the network sees."""
    if (progress := _PROGRESS.get()) is not None:
        progress.images += images


def _numbered(description: str) -> str:
    progress = _PROGRESS.get()
    if progress is None or not progress.at:
        return description
    return f"step {1 + progress.names.index(progress.at)} of {len(progress.names)}: {description}"


Item = TypeVar("Item")
Value = TypeVar("Value")
MAX_CPU_BATCH = 64  # maximum batch size on a CPU, because the activations of more images leave the cache
LOG_SECONDS: Final = 30.0  # minimum time between two lines in a log, in seconds


@dataclass(frozen=True)
class Compute:
    """The device, precision, batch size, memory and processes with which a fit computes features.

    Every sum over images goes through :meth:`sum_`, so what is computed from sums is the same in each process.
    """

    device: torch.device
    precision: Precision = "fp32"  # of the network
    batch_images: int = BATCH_IMAGES  # maximum batch size
    max_memory: int = MAX_MEMORY  # budget for the statistics of a stage and the features of a batch, bytes
    rank: int = 0  # of this process among those that fit one model
    world: int = 1  # their number

    @property
    def batch_size(self) -> int:
        return min(self.batch_images, MAX_CPU_BATCH) if self.device.type == "cpu" else self.batch_images

    @property
    def device_memory(self) -> int:
        """Return ``max_memory``, or a quarter of a GPU's free memory if that is more, for what changes no result.

        Several processes might see different amounts, but have to make the same passes.
        """
        if self.device.type != "cuda" or self.max_memory < MAX_MEMORY or self.world > 1:
            return self.max_memory
        return max(self.max_memory, torch.cuda.mem_get_info(self.device)[0] // 4)

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the processes, in place; every process must make the same calls."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def first(self, value: int) -> int:
        """Return the first process's value, in all processes."""
        return int(self.sum_(torch.tensor([value if self.rank == 0 else 0])))

    def require(self, dataset: ImageDataset) -> None:
        """Raise :class:`UsageError` in all processes if one would have no image, so that none waits for another."""
        if len(dataset) < self.world:
            raise UsageError(
                f"expected at least one image of {dataset.name} for each of {self.world} processes, got "
                f"{len(dataset)}; start fewer processes"
            )

    def shard(self, dataset: ImageDataset) -> ImageDataset:
        """Return the images of this process, in order: image i belongs to process i mod world."""
        return dataset.subset(torch.arange(self.rank, len(dataset), self.world)) if self.world > 1 else dataset

    def shard_examples(self, dataset: ImageDataset) -> Int[Tensor, " examples"]:
        """Return the positions, among the labelled examples of ``dataset``, of those in :meth:`shard`."""
        image = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())
        return torch.nonzero(image % self.world == self.rank).flatten()


def passes(
    dataset: ImageDataset,
    compute: Compute,
    description: str,
    step: Callable[[Tensor], Value],
    *,
    order: Tensor | None = None,
    kept: KeptLayers | None = None,
) -> Iterator[tuple[Value, Batch]]:
    """Yield ``step(standardised images)``, on the device in inference mode, with its batch, and report the progress.

    Features that are ``kept`` are not computed again, and others are kept, if there is room.
    """
    release_freed_memory()
    places = torch.arange(len(dataset)) if order is None else order
    for batch in track_images(dataset, compute, description, order):
        at, places = places[: len(batch.images)], places[len(batch.images) :]
        value: Any = None if kept is None else kept.get(at)
        if value is None:
            with torch.inference_mode():
                images = dataset.preprocess.standardise(batch.images.to(compute.device, non_blocking=True))
                with autocast(compute.device, compute.precision):
                    value = step(images)
                count_images(len(images))
                if kept is not None:
                    kept.add(at, value)
        yield value, batch


def track_images(
    dataset: ImageDataset, compute: Compute, description: str, order: Tensor | None = None
) -> Iterator[Batch]:
    batches = dataset.batches(compute.batch_size, order=order)
    total = len(dataset if order is None else order)
    return track(batches, total=total, description=description, size=lambda batch: len(batch.images))


def track(
    items: Iterable[Item], *, total: int, description: str, size: Callable[[Item], int] = lambda _: 1
) -> Iterator[Item]:
    """Yield ``items`` and report how many of ``total`` are done, the rate, and the time left; an item counts its size.

    There may be fewer: a search that ends early.  A bar makes room for the next; instead of one, a file or pipe gets
    one line at the end and at most one every :data:`LOG_SECONDS`.
    """
    description = _numbered(description)
    if sys.stderr.isatty():
        with tqdm(desc=description, total=total, dynamic_ncols=True, leave=False) as bar:
            for item in items:
                yield item
                bar.update(size(item))
        return

    def log(total: int, seconds: float) -> None:
        left = f", {seconds * (total - done) / done:.0f} s left" if 0 < done < total else ""
        rate = done / max(seconds, 1e-9)
        print(f"{description} {done}/{total} ({rate:.1f}/s, {seconds:.0f} s{left})", file=sys.stderr, flush=True)

    began = last = time.monotonic()
    done = 0
    for item in items:
        yield item
        done += size(item)
        if (now := time.monotonic()) - last >= LOG_SECONDS and done < total:
            last = now
            log(total, now - began)
    log(done, time.monotonic() - began)


Step = Callable[[Tensor], list[Tensor]]  # from standardised images to the features of each layer
Ranges = Callable[[list[Tensor]], Sequence[Tensor]]  # from these features to the columns (batch, columns) of each range


def add_statistics(
    statistics: Sequence[ClassScatter],
    data: ImageDataset,
    compute: Compute,
    description: str,
    step: Step,
    of: Ranges,
    *,
    kept: KeptLayers | None = None,
) -> None:
    """Add the images of this process to the statistics of each range, class by class, then sum over all processes."""
    order = stable_order(data.first_labels())
    for features, batch in passes(data, compute, description, step, order=order, kept=kept):
        pairs = class_pairs(batch.labels, batch.image_index, compute.device)
        for columns, scatter in zip(of(features), statistics, strict=True):
            scatter.add(columns, pairs)
    for scatter in statistics:
        scatter.all_reduce(compute.sum_)


def distances_to_means(
    means: Sequence[Tensor], data: ImageDataset, compute: Compute, description: str, step: Step, of: Ranges
) -> Iterator[tuple[Batch, Sequence[Tensor], list[Tensor]]]:
    """Yield every batch of ``data``, in order, with the columns of each range and their distances to the class means.

    ``means`` (classes, columns) are those of the leading ranges, and are overwritten; the distances (batch, classes) of
    each are those of :func:`.distances_from`.
    """
    distances = [distances_from(class_means) for class_means in means]
    for features, batch in passes(data, compute, description, step):
        columns = of(features)
        yield batch, columns, [measure(part) for measure, part in zip(distances, columns, strict=False)]
