"""Compute batches, eagerly or on CUDA by replaying captured graphs, behind one interface."""

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
    """Return the fastest step for ``device``.

    Args:
        network: The pipeline, already on ``device``.
        shape: (channels, height, width) of an image.
        max_batch: The maximum number of images in a step.
        device: The device of the network.
        compiled: Whether to run the network through ``torch.compile``.
        threads: The numbers of threads on a CPU; by default PyTorch's present number, and one for a quick step.
    """
    run = CompiledNetwork(network) if compiled else network
    # A network that is not traced may let the host decide how to go on, which a captured graph cannot.
    if device.type == "cuda" and network.is_traced:
        return GraphStep(run, shape, max_batch=max_batch, device=device)
    return EagerStep(run, shape, max_batch=max_batch, device=device, fixed_shapes=compiled, threads=threads)
