"""Options that the stages of a fit share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from psc_core.collapse.measure import DEFAULT_MEMORY_BYTES
from psc_core.collapse.report import EPSILON, Candidate
from psc_core.compute.device import resolve_device
from psc_core.compute.distributed import Reducer
from psc_core.compute.passes import Compute
from psc_core.errors import UsageError
from psc_core.precision import PRECISIONS


@dataclass(frozen=True)
class FitOptions:
    """Options that several stages share.

    Example:
        >>> FitOptions(device="cpu", batch_images=32).compute().batch_size
        32

    Attributes:
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.
        precision: ``"fp32"`` or ``"bf16"`` of the network, while fitting and served.
        batch_images: Maximum number of images that go through the network at once; a CPU takes fewer.
        epsilon: Collapse cut-off for NC1.
        max_memory_bytes: Budget of one stage's statistics.
        seed: Splits the validation images and seeds the head.
        reducer: Sums over processes.
    """

    device: str | torch.device = "auto"
    precision: str = "fp32"
    batch_images: int = 256
    epsilon: float = EPSILON
    max_memory_bytes: int = DEFAULT_MEMORY_BYTES
    seed: int = 0
    reducer: Reducer = field(default_factory=Reducer)

    @classmethod
    def of(cls, options: FitOptions | None, candidate: Candidate) -> FitOptions:
        """``options``, or defaults that agree with how a candidate was chosen.

        Raises:
            UsageError: They have another seed, so that images of the calibration split chose the candidate, or
                another epsilon.
        """
        report = candidate.report
        chosen: dict[str, Any] = {} if report is None else {"epsilon": report.epsilon}
        if report is not None and report.seed is not None:
            chosen["seed"] = report.seed
        if options is None:
            return cls(**chosen)
        for name, value in chosen.items():
            if getattr(options, name) != value:
                raise UsageError(
                    f"expected {name}={value!r}, with which {'+'.join(candidate.layers)} was chosen as the candidate, "
                    f"got {getattr(options, name)!r}; use the same options in every stage"
                )
        return options

    def compute(self) -> Compute:
        """Device, precision and batch size.

        Raises:
            UsageError: An unknown precision, or a device that is not there.
        """
        if self.precision not in PRECISIONS:
            raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {self.precision!r}")
        return Compute(resolve_device(self.device), self.precision, self.batch_images)
