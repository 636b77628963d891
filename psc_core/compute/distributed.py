"""Fit one model in several processes: each reads its shard of the images, and sums are taken over all processes.

Under ``torchrun`` every process runs the same program, and image i belongs to process i mod world.  Every sum over
images goes through :meth:`Reducer.sum_`, so everything computed from sums is the same in each process.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from torch import distributed as dist

from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError


class Process(NamedTuple):
    """This process among those that ``torchrun`` started; by default the only one."""

    rank: int = 0  # from 0
    world: int = 1  # number of processes
    local_rank: int = 0  # on this machine, from 0
    local_world: int = 1  # number of processes on this machine

    @classmethod
    def from_environment(cls) -> Process:
        """Read ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and ``LOCAL_WORLD_SIZE``, which ``torchrun`` sets."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ.get(name, alone)) for name, alone in zip(names, cls(), strict=True)))

    @property
    def gpu(self) -> int | None:
        """The index of this process's GPU, or None without GPUs; processes that outnumber the GPUs share them."""
        gpus = torch.cuda.device_count()
        return self.local_rank % gpus if gpus else None

    @property
    def shares_gpus(self) -> bool:
        """True if two processes on this machine use the same GPU, which NCCL refuses."""
        return 0 < torch.cuda.device_count() < self.local_world


@dataclass(frozen=True)
class Reducer:
    """Process ``rank`` (from 0) of the ``world`` processes that fit one model; a single process by default."""

    rank: int = 0
    world: int = 1

    @classmethod
    def start(cls) -> Reducer:
        """Join the processes that ``torchrun`` started, with Gloo for CPU tensors and NCCL for CUDA tensors.

        If processes share a GPU, Gloo sums CUDA tensors too.  Each process leaves the group when the program ends.

        Raises:
            UsageError: If ``torchrun`` did not start this process.
        """
        if "WORLD_SIZE" not in os.environ:
            raise UsageError(
                "--distributed needs torchrun, WORLD_SIZE is not set; run "
                "torchrun --nproc-per-node N -m psc_core.cli … --distributed"
            )
        process = Process.from_environment()
        if process.gpu is not None:
            torch.cuda.set_device(process.gpu)
        dist.init_process_group("gloo" if process.shares_gpus else None)
        atexit.register(dist.destroy_process_group)
        return cls(dist.get_rank(), dist.get_world_size())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum ``tensor`` over the processes, in place; every process must make the same calls."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def first(self, value: int) -> int:
        """Return the value of the first process, in all processes."""
        return int(self.sum_(torch.tensor([value if self.rank == 0 else 0])))

    def require(self, dataset: ImageDataset) -> None:
        """Raise :class:`UsageError` in all processes if one would have no image, so that none waits for another."""
        if len(dataset) < self.world:
            raise UsageError(
                f"expected at least one image of {dataset.name} for each of {self.world} processes, got "
                f"{len(dataset)}; start fewer processes"
            )

    def shard(self, dataset: ImageDataset) -> ImageDataset:
        """Return the images of this process, in order."""
        return dataset.subset(torch.arange(self.rank, len(dataset), self.world)) if self.world > 1 else dataset

    def shard_examples(self, dataset: ImageDataset) -> Int[Tensor, " examples"]:
        """Return the positions, among the labelled examples of ``dataset``, of those in :meth:`shard`."""
        image = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())
        return torch.nonzero(image % self.world == self.rank).flatten()
