"""The settings of a fit: the flags of ``psc-fit`` with their defaults, and those of them that a bundle records.

What needs torch is imported when a fit begins, so that the command line shows the defaults at once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final

from psc_core.compute import MAX_MEMORY
from psc_core.errors import UsageError
from psc_core.precision import PRECISIONS

if TYPE_CHECKING:
    import torch

    from psc_core.compute.distributed import Reducer
    from psc_core.compute.passes import Compute

EPSILON: Final = 0.2
"""Neural collapse cutoff ε on NC1, as in the paper."""

_LAST: Final = {"last": True}
"""Marks what only the last stage reads: changing it after an error does not start again."""

PREDICTIONS: Final = ("auto", "psc", "base")
"""The predictions that a model can give: the better, the head's, or the network's own."""

HEAD_INPUTS: Final = ("both", "z")
"""The inputs of a classifier's head: z and the features averaged over positions, or z alone as in the paper."""

OOD_SCORES: Final = ("gates", "density")
"""The parts that an OOD score, and with it the p-value, can be made of."""


@dataclass(frozen=True)
class FitSettings:
    """Settings of all stages; the names are those of the flags and of a bundle's provenance.

    Example:
        >>> FitSettings(device="cpu", batch_images=32).compute().batch_size
        32
    """

    task: str = "classification"
    layer: str = "auto"  # candidate layer; auto: chosen by collapse
    layers: str | None = None  # regular expression of the layers that are measured; None for all
    granularity: str = "operations"
    epsilon: float = EPSILON
    c_proj: int | None = None  # None: chosen, as d_proj and pca
    d_proj: int | None = None
    minimum_dim: int = 64
    no_second_scaling: bool = False
    density: str = "pooled++"
    pca: int | None = field(default=None, metadata=_LAST)
    head: str | None = field(default=None, metadata=_LAST)  # None: the first of the task
    head_input: str = field(default="both", metadata=_LAST)  # of a classifier
    predictions: str = field(default="auto", metadata=_LAST)
    alpha: float = field(default=0.05, metadata=_LAST)
    coverage: float = field(default=0.95, metadata=_LAST)
    risk: float = field(default=0.05, metadata=_LAST)  # of a classifier
    max_width: float | None = field(default=None, metadata=_LAST)  # of a regression, target's unit; None for no limit
    ood_score: str = field(default="gates", metadata=_LAST)
    keep_examples: int | None = field(default=None, metadata=_LAST)  # training images kept as thumbnails; None: none
    precision: str = "fp32"
    batch_images: int = 256
    max_images: int | None = None  # training images that are used, balanced over classes; None for all
    max_memory: int = MAX_MEMORY  # bytes
    seed: int = 0
    device: str | torch.device = "auto"  # auto, cpu, cuda or cuda:N; of this machine, so that no bundle records it

    def of_task(self, task: str, heads: Collection[str]) -> FitSettings:
        """Return the settings of one task, with its first head where none is named."""
        return replace(self, task=task, head=self.head_of(heads))

    def head_of(self, heads: Collection[str]) -> str:
        """Return the kind of head, by default the first of the task's."""
        return self.head or next(iter(heads))

    def compute(self, reducer: Reducer | None = None) -> Compute:
        """Return device, precision, batch size, processes and memory; all stages of a fit take the same.

        Args:
            reducer: This process among those that fit; None for the only one.

        Raises:
            UsageError: An unknown precision, or a device that is not there.
        """
        from psc_core.compute.device import resolve_device
        from psc_core.compute.distributed import Reducer
        from psc_core.compute.passes import Compute

        if self.precision not in PRECISIONS:
            raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {self.precision!r}")
        device, processes = resolve_device(self.device), reducer or Reducer()
        return Compute(device, self.precision, self.batch_images, processes, self.max_memory)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a bundle records, JSON types."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "device"}

    def of_stages(self) -> dict[str, Any]:
        """Return the settings that the stages in a checkpoint read, JSON types."""
        last = {each.name for each in fields(self) if "last" in each.metadata}
        return {name: value for name, value in self.recorded().items() if name not in last}
