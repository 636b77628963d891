"""What :meth:`psc_core.PSCRegressor.predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.model.decision import ValueDecisions
from psc_core.model.outputs import Outputs
from psc_core.target import Target
from psc_core.value_prediction import VALUE_DECISIONS, VALUE_SCORES


@dataclass(frozen=True)
class ValuePredictions:
    """Predictions of a regression for n images, on the CPU.

    Every score of :class:`psc_core.value_prediction.ValuePrediction` is an attribute, ``float32 (n,)``, as ``mean``.
    """

    outputs: Outputs[Tensor]  # of the network step
    decisions: ValueDecisions  # under the bundle's policy
    target: Target

    def __len__(self) -> int:
        return len(self.outputs)

    def __getattr__(self, name: str) -> Tensor:
        if name not in VALUE_SCORES:
            raise AttributeError(f"'ValuePredictions' has no attribute {name!r}")
        return self.outputs[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *VALUE_SCORES]

    @property
    def lower(self) -> Tensor:
        """``float32 (n,)`` lower end of what holds the true number with the bundle's coverage."""
        return torch.from_numpy(self.decisions.lower)

    @property
    def upper(self) -> Tensor:
        """``float32 (n,)`` upper end."""
        return torch.from_numpy(self.decisions.upper)

    @property
    def interval(self) -> Tensor:
        """``float32 (n, 2)``, both ends."""
        return torch.stack([self.lower, self.upper], dim=1)

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
        """``"abstain_ood"`` if ``is_ood``, else ``"abstain_uncertain"`` where the interval is wider than the bundle's
        ``max_width``, else ``"accept"``, for each image."""
        return tuple(VALUE_DECISIONS[code] for code in self.decisions.decision.tolist())
