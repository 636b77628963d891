"""The base of every task's calibration: the OOD scores of n calibration images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Float
from torch import Tensor

from psc_core.calibration.conformal import ood_score_threshold


@dataclass(frozen=True)
class BaseCalibration:
    """Scores of n calibration images, float32, each sorted for itself."""

    ood_scores: Float[Tensor, " n"]  # OOD scores, ascending, nats

    def __len__(self) -> int:
        return len(self.ood_scores)

    def ood_score_threshold(self, alpha: float) -> float:
        """Return the OOD score (nats) above which an image's p-value is at most α.

        ``p ≤ α ⇔ OOD score > threshold``, exactly, also where the rounding of p matters.

        Raises:
            UsageError: ``alpha`` is not in (0, 1) or below ``1 / (n + 1)``.
        """
        return ood_score_threshold(self.ood_scores, alpha)

    def entropy_quantiles(self) -> list[float] | None:
        """Return the 0, 1, …, 100 % quantiles of the predictive entropies, nats; None where the task has none."""
        return None

    def check_classes(self, count: int) -> None:
        """Reject, by :class:`BundleError`, scores that are of another number of classes."""

    def thresholds(self, policy: Any) -> Any:
        """Return the thresholds that a policy of the task means here.

        Raises:
            UsageError: n is too small for its alpha or its coverage.
        """
        raise NotImplementedError

    def tensors(self) -> dict[str, Tensor]:
        """Return the scores by name, for a safetensors file."""
        raise NotImplementedError

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BaseCalibration:
        """Inverse of :meth:`tensors`.

        Raises:
            BundleError: A tensor is missing, has another type or length, or its scores do not ascend or are not finite.
        """
        raise NotImplementedError
