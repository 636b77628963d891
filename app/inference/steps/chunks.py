"""A large batch on a CPU in parallel chunks, each on threads of its own.

The threads of one operation wait for the slowest of them.  In a service the event loop interrupts one thread or
another all the time, and dozens of operations make that dozens of waits; chunks wait for each other once, at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Final

import torch
from torch import Tensor

MIN_CHUNK_IMAGES: Final = 12
"""With smaller chunks convolutions lose more than the waiting costs."""


class ParallelChunks:
    """Calls a network, from several threads where that is allowed.

    Args:
        network: Images to outputs, each image by itself.
        threads: Of PyTorch; may be changed between calls.
        concurrent: Whether several threads may call the network at once.
    """

    def __init__(self, network: Callable[[Tensor], Tensor], threads: int, *, concurrent: bool) -> None:
        self.threads = threads
        self._network = network
        self._pool = ThreadPoolExecutor(threads, "psc-chunk") if concurrent else None

    def __call__(self, images: Tensor) -> Tensor:
        """The outputs of all images; the first chunk runs on the calling thread.

        An error of any chunk is raised when none is running any more, so the caller may then change ``images``.
        """
        count = min(self.threads, len(images) // MIN_CHUNK_IMAGES)
        if self._pool is None or count < 2:
            return self._run(images, self.threads)
        first, *others = images.tensor_split(count)
        running = [self._pool.submit(self._run, chunk, self.threads // count) for chunk in others]
        try:
            outputs = self._run(first, self.threads // count)
        finally:
            wait(running)
        return torch.cat([outputs, *(chunk.result() for chunk in running)])

    @torch.inference_mode()
    def _run(self, images: Tensor, threads: int) -> Tensor:
        if torch.get_num_threads() != threads:  # PyTorch counts them for each calling thread.
            torch.set_num_threads(threads)
        return self._network(images)
