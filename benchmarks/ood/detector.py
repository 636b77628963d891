"""Detectors: functions that score images from the features of one pass of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from benchmarks.fitting import Penultimate


@dataclass(frozen=True)
class Spaces(Penultimate):
    """Penultimate features and logits, and other feature vectors of the same images by name, on the CPU."""

    vectors: Mapping[str, Float[Tensor, "n _"]] = field(default_factory=dict)


Score = Callable[[Spaces], Tensor]
"""Out-of-distribution scores ``(n,)`` of images, higher is more out-of-distribution."""


@dataclass(frozen=True)
class Detector:
    """A fitted detector.

    Attributes:
        name: In tables.
        family: ``"psc"``, ``"penultimate"``, ``"psc_core baseline"`` or ``"pytorch-ood"``.
        score: Gives the OOD scores.
        space: Feature vectors that it reads: a name in :attr:`Spaces.vectors`, or ``"penultimate"``.
        memory_bytes: Size of its tensors, without the network and the projection of its space.
    """

    name: str
    family: str
    score: Score
    space: str
    memory_bytes: int


def memory_bytes(model: object) -> int:
    """Bytes of all tensors and arrays reachable from an object."""
    return sum(_sizes(model, set()))


def _sizes(value: object, seen: set[int]) -> list[int]:
    if id(value) in seen:
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value.numel() * value.element_size()]
    if isinstance(value, np.ndarray):
        return [value.nbytes]
    inside: list[object] = []
    if isinstance(value, nn.Module):
        inside = list(value.state_dict().values())
    elif isinstance(value, dict):
        inside = list(value.values())
    elif isinstance(value, list | tuple):
        inside = list(value)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        inside = list(vars(value).values())
    return [size for part in inside for size in _sizes(part, seen)]


@torch.no_grad()
def scored(detector: Detector, images: Spaces) -> Float[Tensor, " n"]:
    """Scores as float64; NaN counts as infinitely out-of-distribution."""
    return torch.nan_to_num(detector.score(images).double().cpu(), nan=torch.inf)
