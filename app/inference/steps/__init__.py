"""Compute batches: eagerly, or on CUDA by replaying captured graphs; one interface for both."""

from __future__ import annotations

import torch

from app.inference.steps.base import CompiledNetwork, Step, TorchThreads
from app.inference.steps.eager import EagerStep
from app.inference.steps.graph import GraphStep
from psc_core.model.pipeline import Pipeline

__all__ = ["EagerStep", "GraphStep", "Step", "TorchThreads", "make_step"]


def make_step(
    network: Pipeline,
    shape: tuple[int, int, int],
    *,
    max_batch: int,
    device: torch.device,
    compiled: bool = False,
    threads: TorchThreads | None = None,
) -> Step:
    """The fastest step for ``device``.

    Args:
        network: On ``device`` already.
        shape: (channels, height, width).
        max_batch: Maximum number of images in a step.
        device: Where the network is.
        compiled: Run it through ``torch.compile``.
        threads: Used on a CPU; by default as many as PyTorch uses now, and one for a quick step.
    """
    run = CompiledNetwork(network) if compiled else network
    if device.type == "cuda" and network.is_traced:  # A network cut by hooks may ask the host what to do next.
        return GraphStep(run, shape, max_batch=max_batch, device=device)
    return EagerStep(run, shape, max_batch=max_batch, device=device, fixed_shapes=compiled, threads=threads)
