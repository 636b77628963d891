"""The base of every task's predictions: outputs and decisions for n images, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from psc_core.tasks.outputs import Outputs


@dataclass(frozen=True)
class BasePrediction:
    """Predictions for n images; every score of the task's answer is an attribute, ``float32 (n,)``."""

    decision_names: ClassVar[tuple[str, ...]]

    outputs: Outputs[Tensor]  # of the network step
    decisions: Any  # under the bundle's policy

    def __len__(self) -> int:
        return len(self.outputs)

    def __getattr__(self, name: str) -> Tensor:
        outputs = self.__dict__.get("outputs")  # Absent while it is unpickled.
        if outputs is None or name not in outputs.scores:
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}")
        column: Tensor = outputs[name]
        return column

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.outputs.scores]

    @property
    def gates(self) -> dict[str, Tensor]:
        """``float32 (n,)`` p-value of each gate, by name; empty for a model without gates."""
        return dict(zip(self.outputs.gates, self.outputs.gate_p_values.T, strict=True))

    @property
    def is_ood(self) -> Tensor:
        """``bool (n,)`` p-value at most the bundle's α."""
        return torch.from_numpy(self.decisions.is_ood)

    @property
    def decision(self) -> tuple[str, ...]:
        """The name of each image's decision."""
        return tuple(self.decision_names[code] for code in self.decisions.decision.tolist())

    def column(self, field: str) -> Sequence[Any] | Tensor:
        """Return a field of the task's answer for every image, as :mod:`psc_core.scoring` writes it."""
        if field == "gates":
            rows = zip(*(p_values.tolist() for p_values in self.gates.values()), strict=True)
            return [dict(zip(self.gates, row, strict=True)) for row in rows] or [None] * len(self)
        values: Sequence[Any] | Tensor = getattr(self, field)
        return values
