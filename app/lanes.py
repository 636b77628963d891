"""A large batch on a CPU in parts at once, each on threads of its own.

The threads of one operation wait for the slowest of them.  In a service the loop that reads requests interrupts one
thread or another all the time, and dozens of operations a batch make that dozens of waits; the parts of a batch
wait for each other once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import torch
from torch import Tensor

IMAGES_A_LANE: Final = 12
"""Fewest images of a part: with fewer, convolutions lose more than the waiting costs."""


class Lanes:
    """Calls a network, from several threads where that is allowed.

    Args:
        network: Images to rows, each image by itself.
        threads: Of PyTorch; may be changed between calls.
        concurrent: Whether several threads may call the network at once.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], threads: int, *, concurrent: bool) -> None:
        self.threads = threads
        self._network = network
        self._pool = ThreadPoolExecutor(threads, "psc-lane") if concurrent else None

    def __call__(self, images: Tensor) -> Tensor:
        """The rows of all images; the first part runs on the calling thread.

        An error of any part is raised when none is running any more, so the caller may then change ``images``.
        """
        lanes = min(self.threads, len(images) // IMAGES_A_LANE)
        if self._pool is None or lanes < 2:
            return self._part(images, self.threads)
        first, *others = images.tensor_split(lanes)
        running = [self._pool.submit(self._part, part, self.threads // lanes) for part in others]
        try:
            rows = self._part(first, self.threads // lanes)
        finally:
            wait(running)
        return torch.cat([rows, *(part.result() for part in running)])

    @torch.inference_mode()
    def _part(self, images: Tensor, threads: int) -> Tensor:
        if torch.get_num_threads() != threads:  # PyTorch counts them for each calling thread.
            torch.set_num_threads(threads)
        return self._network(images)
