"""The base of every task's calibration: the OOD scores of n calibration images, and what a policy implies on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from psc_core.conformal import decision_p_value, ood_score_threshold
from psc_core.tasks.decide import BaseThresholds
from psc_core.tasks.policy import BasePolicy


@dataclass(frozen=True)
class BaseCalibration:
    """Scores of n calibration images, float32, each sorted separately."""

    thresholds_type: ClassVar[type[BaseThresholds]]

    ood_scores: Float[Tensor, " n"]  # OOD scores, ascending, nats

    def __len__(self) -> int:
        return len(self.ood_scores)

    def ood_score_threshold(self, alpha: float) -> float:
        """Return the OOD score (nats) above which an image's p-value is at most α.

        ``p ≤ α ⇔ OOD score > threshold``, exactly, even where the rounding of p matters.

        Raises:
            UsageError: If ``alpha`` is not in (0, 1) or below ``1 / (n + 1)``.
        """
        return ood_score_threshold(self.ood_scores, alpha)

    def entropy_quantiles(self) -> list[float] | None:
        """Return the 0, 1, …, 100 % quantiles of the predictive entropies, nats; None where the task has none."""
        return None

    def check_classes(self, count: int) -> None:
        """Raise :class:`BundleError` for scores of another number of classes."""

    def changed(self, policy: BasePolicy, changes: Mapping[str, float]) -> BasePolicy:
        """Return the policy with other values of some thresholds, and of what these promise."""
        return policy.model_copy(update=dict(changes))

    def thresholds(self, policy: BasePolicy) -> BaseThresholds:
        """Return the thresholds that a policy of the task implies on these images.

        Raises:
            UsageError: If n is too small for its alpha or its coverage.
        """
        p_value = decision_p_value(policy.alpha, len(self))
        return self.thresholds_type(policy, p_value, self.quantile(policy.coverage))

    def quantile(self, coverage: float) -> float:
        """Return the conformal quantile that bounds prediction sets or intervals of this nominal coverage.

        Raises:
            UsageError: If ``coverage`` is not in (0, 1), or n is too small for it.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the scores by name, for a safetensors file."""
        raise NotImplementedError

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BaseCalibration:
        """Return the calibration whose :meth:`tensors` these are.

        Raises:
            BundleError: If a tensor is missing, has another type or length, or its scores do not ascend or are not
                finite.
        """
        raise NotImplementedError
