"""What :meth:`psc_core.PSC.predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from psc_core.model.decision import Decisions
from psc_core.model.outputs import Outputs
from psc_core.prediction import DECISIONS, SCORES


@dataclass(frozen=True)
class Prediction:
    """Predictions for n images, on the CPU.

    Every score of :class:`psc_core.prediction.ImagePrediction` is an attribute, ``float32 (n,)``, as
    ``log_density``.

    Example:
        >>> from psc_core import PSC
        >>> bundle = "artifacts/dirty-mnist-resnet18"
        >>> prediction = PSC.load(bundle).predict([f"{bundle}/examples/clean.png"])
        >>> prediction.labels, prediction.prediction_set, prediction.predictive_entropy < 0.1
        (('7',), (('7',),), tensor([True]))
    """

    outputs: Outputs[Tensor]  # of the network step
    decisions: Decisions  # under the bundle's policy
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.outputs)

    def __getattr__(self, name: str) -> Tensor:
        if name not in SCORES:
            raise AttributeError(f"'Prediction' has no attribute {name!r}")
        return self.outputs[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *SCORES]

    @property
    def class_index(self) -> Tensor:
        """``int64 (n,)`` most probable class."""
        return torch.from_numpy(self.decisions.class_index)

    @property
    def labels(self) -> tuple[str, ...]:
        """Its name, for each image."""
        return tuple(self.classes[k] for k in self.decisions.class_index.tolist())

    @property
    def confidence(self) -> Tensor:
        """``float32 (n,)`` its probability."""
        return torch.from_numpy(self.decisions.confidence)

    @property
    def probabilities(self) -> Tensor:
        """``float32 (n, K)``."""
        return self.outputs.probabilities

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
        """``"abstain_ood"`` if ``is_ood``, else ``"abstain_ambiguous"`` above the bundle's entropy threshold, else
        ``"accept"``, for each image."""
        return tuple(DECISIONS[code] for code in self.decisions.decision.tolist())

    @property
    def prediction_set(self) -> tuple[tuple[str, ...], ...]:
        """Classes that hold the true one with the bundle's coverage, for each image."""
        sets = self.decisions.prediction_set
        return tuple(tuple(self.classes[k] for k in members.nonzero()[0].tolist()) for members in sets)
