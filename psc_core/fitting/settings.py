"""How a bundle is fitted: what the flags of ``psc-fit`` set, with their defaults, and what the bundle records."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

import torch

from psc_core.collapse.measure import DEFAULT_MEMORY_BYTES
from psc_core.collapse.report import EPSILON
from psc_core.compute.distributed import Reducer
from psc_core.fitting.options import FitOptions

LATE: Final = ("pca", "head", "predictions", "alpha", "coverage", "risk", "max_width", "ood_score")
"""What only the last stage reads, no stage in a checkpoint: changing it after an error does not start again."""

TASKS: Final = ("classification", "regression")


@dataclass(frozen=True)
class FitSettings:
    """Settings of all stages; the names are those of the flags and of a bundle's provenance."""

    task: str = TASKS[0]
    layer: str = "auto"  # candidate layer; auto: chosen by collapse
    layers: str | None = None  # regular expression of the layers that are measured; None for all
    granularity: str = "operations"
    epsilon: float = EPSILON
    c_proj: int | None = None  # None: chosen, as d_proj and pca
    d_proj: int | None = None
    minimum_dim: int = 64
    no_second_scaling: bool = False
    density: str = "pooled++"
    pca: int | None = None
    head: str = "laplace"
    predictions: str = "psc"
    alpha: float = 0.05
    coverage: float = 0.95
    risk: float = 0.05  # of a classifier
    max_width: float | None = None  # of a regression, in the target's unit; None for no limit
    ood_score: str = "gates"
    precision: str = "fp32"
    batch_images: int = 256
    max_images: int | None = None  # training images that are used, balanced over classes; None for all
    max_memory: int = DEFAULT_MEMORY_BYTES  # bytes
    seed: int = 0

    def options(self, device: torch.device, reducer: Reducer) -> FitOptions:
        """What the stages share."""
        return FitOptions(
            device=device,
            precision=self.precision,
            batch_images=self.batch_images,
            epsilon=self.epsilon,
            max_memory_bytes=self.max_memory,
            seed=self.seed,
            reducer=reducer,
        )

    def late(self) -> dict[str, Any]:
        """The arguments of ``fit_psc`` alone, or of ``fit_regressor``."""
        other = "max_width" if self.task == TASKS[0] else "risk"
        return {name: value for name, value in asdict(self).items() if name in LATE and name != other}
