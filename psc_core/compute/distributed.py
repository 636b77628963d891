"""Several processes fit one model: each reads its share of the images, and sums are added up.

Under ``torchrun`` every process runs the same program; image i belongs to process i mod world.  What is summed
over images goes through :meth:`Reducer.sum_`; everything computed from sums is then the same in each process.
"""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor
from torch import distributed as dist

from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError


@dataclass(frozen=True)
class Reducer:
    """This process's place among its peers; alone by default.

    Attributes:
        rank: Number of this process, from 0.
        world: Number of processes.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def start(cls) -> Reducer:
        """Join the processes that ``torchrun`` started: Gloo carries CPU tensors, NCCL those of CUDA.

        Each process is given the GPU of its local rank, and leaves when the program ends.

        Raises:
            UsageError: Not started by ``torchrun``.
        """
        if "WORLD_SIZE" not in os.environ:
            raise UsageError(
                "expected to be started by torchrun, WORLD_SIZE is not set; run "
                "torchrun --nproc-per-node N -m psc_core.cli … --distributed"
            )
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
        atexit.register(dist.destroy_process_group)
        return cls(dist.get_rank(), dist.get_world_size())

    def sum_(self, tensor: Tensor) -> Tensor:
        """Add ``tensor`` up over the processes, in place; every process must call this alike."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def require(self, dataset: ImageDataset) -> None:
        """Refuse fewer images than processes, in every process alike, before one of them waits for the others.

        Raises:
            UsageError: Some process would have no image.
        """
        if len(dataset) < self.world:
            raise UsageError(
                f"expected at least one image of {dataset.name} for each of {self.world} processes, it has "
                f"{len(dataset)}; start fewer"
            )

    def shard(self, dataset: ImageDataset) -> ImageDataset:
        """The images that belong to this process, in order."""
        if self.world == 1:
            return dataset
        return dataset.subset(torch.arange(self.rank, len(dataset), self.world))

    def shard_examples(self, dataset: ImageDataset) -> Int[Tensor, " rows"]:
        """Where the rows of :meth:`shard` are among the rows of ``dataset``."""
        image = torch.arange(len(dataset)).repeat_interleave(dataset.offsets.diff())
        return torch.nonzero(image % self.world == self.rank).flatten()
