"""What all detectors have in common: they score images by features that one pass of the network gave."""

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
    """Penultimate features and logits, with other feature vectors of the same images by name, on the CPU."""

    vectors: Mapping[str, Float[Tensor, "rows _"]] = field(default_factory=dict)


Score = Callable[[Spaces], Tensor]
"""Out-of-distribution scores ``(n,)`` of images, higher is more out-of-distribution."""


@dataclass(frozen=True)
class Detector:
    """A fitted detector.

    Attributes:
        name: In tables.
        family: ``"psc"``, ``"penultimate"``, ``"psc_core baseline"`` or ``"pytorch-ood"``.
        score: Its scores.
        space: The feature vectors that it reads: a name in :attr:`Spaces.vectors`, or ``"penultimate"``.
        memory_bytes: What it keeps besides the network (and besides the projection of its space).
    """

    name: str
    family: str
    score: Score
    space: str
    memory_bytes: int


def memory_bytes(model: object) -> int:
    """Bytes of all tensors and arrays that an object holds, directly or in what it holds."""
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
    """Scores as float64; what is not a number counts as most out-of-distribution."""
    return torch.nan_to_num(detector.score(images).double().cpu(), nan=torch.inf)
