"""The settings of a fit: the flags of ``psc-fit`` with their defaults, and the part that a bundle records.

What needs torch is imported when a fit begins, so that the command line shows the defaults at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final

from psc_core.compute import BATCH_IMAGES, MAX_MEMORY
from psc_core.errors import UsageError, hint
from psc_core.precision import PRECISIONS

if TYPE_CHECKING:
    import torch

    from psc_core.compute.distributed import Reducer
    from psc_core.compute.passes import Compute

EPSILON: Final = 0.2
"""The cutoff ε on NC1 below which a layer has collapsed, as in the paper."""

_LAST: Final = {"last": True}
"""Marks settings that only the last stage reads; an interrupted fit may resume with other values of these."""

PREDICTIONS: Final = ("auto", "psc", "base")
"""The sources of a model's predictions: the better of the two, the fitted head, or the network itself."""

HEAD_INPUTS: Final = ("both", "z")
"""The inputs of a classifier's head: z with the features averaged over positions, or z alone as in the paper."""

OOD_SCORES: Final = ("gates", "density")
"""The scores from which the p-value is computed: all gates combined, or the density alone."""


@dataclass(frozen=True)
class FitSettings:
    """The settings of all stages, named as the flags and the provenance of a bundle name them.

    Example:
        >>> FitSettings(device="cpu", batch_images=32).compute().batch_size
        32
    """

    task: str = "classification"
    layer: str = "auto"  # candidate layer; auto: chosen by collapse
    layers: str | None = None  # regular expression of the layers to measure; None: all
    granularity: str = "operations"
    epsilon: float = EPSILON
    c_proj: int | None = None  # None: chosen by the fit, and so are d_proj and pca
    d_proj: int | None = None
    minimum_dim: int = 64
    no_second_scaling: bool = False
    density: str = "pooled++"
    pca: int | None = field(default=None, metadata=_LAST)
    head: str | None = field(default=None, metadata=_LAST)  # None: the first of the task's heads
    head_input: str = field(default="both", metadata=_LAST)  # classification only
    predictions: str = field(default="auto", metadata=_LAST)
    alpha: float = field(default=0.05, metadata=_LAST)
    coverage: float = field(default=0.95, metadata=_LAST)
    risk: float = field(default=0.05, metadata=_LAST)  # classification only
    max_width: float | None = field(default=None, metadata=_LAST)  # regression only, target's unit; None: no limit
    ood_score: str = field(default="gates", metadata=_LAST)
    keep_examples: int | None = field(default=None, metadata=_LAST)  # training images kept as thumbnails; None: none
    precision: str = "fp32"
    batch_images: int = BATCH_IMAGES
    max_images: int | None = None  # training images to use, balanced over classes; None: all
    max_memory: int = MAX_MEMORY  # bytes
    seed: int = 0
    device: str | torch.device = "auto"  # auto, cpu, cuda or cuda:N; belongs to the machine, so no bundle records it

    def changed(self, changes: Mapping[str, Any]) -> FitSettings:
        """Return the settings with others by name, as Python functions take them.

        Raises:
            UsageError: If a name or the type of a value is none of the settings', or ``task`` is among them, which the
                class or function decides.
        """
        return replace(self, **{name: _checked(name, value) for name, value in changes.items()})

    def of_task(self, task: str, heads: Collection[str]) -> FitSettings:
        """Return the settings for one task, with the task's first head if none is named."""
        return replace(self, task=task, head=self.head_of(heads))

    def head_of(self, heads: Collection[str]) -> str:
        """Return the kind of the head, by default the task's first."""
        return self.head or next(iter(heads))

    def compute(self, reducer: Reducer | None = None) -> Compute:
        """Return the device, precision, batch size, processes and memory that all stages of a fit use.

        Args:
            reducer: The group of processes that fit together; None: this process alone.

        Raises:
            UsageError: If the precision is unknown, the device does not exist, or a batch has no images.
        """
        from psc_core.compute.device import resolve_device
        from psc_core.compute.distributed import Reducer
        from psc_core.compute.passes import Compute

        if self.precision not in PRECISIONS:
            raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {self.precision!r}")
        if self.batch_images < 1:
            raise UsageError(f"expected batch_images of at least 1, got {self.batch_images}")
        device, processes = resolve_device(self.device), reducer or Reducer()
        return Compute(device, self.precision, self.batch_images, processes, self.max_memory)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a bundle records, as JSON types."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "device"}

    def of_stages(self) -> dict[str, Any]:
        """Return the settings that the stages in a checkpoint read, as JSON types."""
        last = {each.name for each in fields(self) if "last" in each.metadata}
        return {name: value for name, value in self.recorded().items() if name not in last}


_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,), "int": (Integral,), "float": (Real,), "bool": (bool,), "None": (type(None),)
}  # fmt: skip
"""The types that a value may have, by the word in a field's annotation."""


def _checked(name: str, value: Any) -> Any:
    """Return the value for a setting; raises :class:`UsageError` if no function takes this name or such a value."""
    if name == "task":
        raise UsageError("expected no task: PSC and fit_psc fit classifiers, PSCRegressor and fit_regressor others")
    annotations = {each.name: str(each.type) for each in fields(FitSettings) if each.name != "task"}
    if name not in annotations:
        raise UsageError(f"expected a setting of a fit, got {name!r}; {hint(name, list(annotations))}")
    if name == "device":
        return value  # Its type is torch's, which is not imported here; compute() refuses what is no device.
    types: tuple[type, ...] = sum((_TYPES[word] for word in annotations[name].split(" | ")), ())
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"expected {name} of type {annotations[name]}, got {value!r} of type {type(value).__name__}")
    if Real in types and isinstance(value, Real):
        return float(value)
    # numpy's integers become Python's, which a manifest can hold.
    return int(value) if Integral in types and isinstance(value, Integral) else value
