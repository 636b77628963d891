"""The calibration of a classifier: scores of calibration images, and the prediction sets that they guarantee.

A prediction set with coverage 1 − α contains the classes whose probability is at least the k-th largest calibration
probability of a true label, ``k = ⌈(n + 1)(1 − α)⌉`` (score ``1 − p_y``: Sadinle et al. 2019).  It contains the true
label with probability ≥ 1 − α, over all images (marginal).  The most probable class is always in the set, which can
only raise coverage.  p-values are those of :mod:`psc_core.conformal`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.conformal import MAX_SCORE, check_ascending, check_names, check_range, check_rates, conformal_rank
from psc_core.errors import BundleError
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.classification.decide import Thresholds
from psc_core.tasks.classification.policy import FLOAT32_ROUNDING
from psc_core.tasks.policy import BasePolicy


@dataclass(frozen=True)
class Calibration(BaseCalibration):
    """Scores of n calibration images, float32, each sorted separately."""

    thresholds_type = Thresholds

    entropies: Float[Tensor, " n"]  # predictive entropies, ascending, nats
    error_bounds: Float[Tensor, " n"]  # of images with at most this entropy, at most this fraction is wrong
    label_probabilities: Float[Tensor, " n"]  # of the true label, ascending
    labels: Int[Tensor, " n"]  # the true label of each entry of label_probabilities
    num_classes: int  # K

    def check_classes(self, count: int) -> None:
        if self.num_classes != count:
            raise BundleError(
                f"expected a calibration of {count} classes, got one of {self.num_classes}; fit the bundle again"
            )

    def entropy_quantiles(self) -> list[float]:
        return [float(value) for value in torch.quantile(self.entropies.cpu(), torch.linspace(0.0, 1.0, 101))]

    def changed(self, policy: BasePolicy, changes: Mapping[str, float]) -> BasePolicy:
        """Return the policy with other values, and the risk that its ambiguity threshold was shown to keep."""
        changed = super().changed(policy, changes)
        if "ambiguity_threshold" not in changes:
            return changed
        return changed.model_copy(update={"risk": self.risk_below(changes["ambiguity_threshold"])})

    def risk_below(self, threshold: float) -> float | None:
        """Return which error rate the images of at most this entropy keep, with 95 % confidence; None: none is shown.

        It holds for a threshold that was not chosen by the errors of these images.
        """
        accepted = int((self.entropies <= threshold).sum())
        bound = float(self.error_bounds[accepted - 1]) if accepted else 1.0
        return bound if bound < 1 else None

    def quantile(self, coverage: float) -> float:
        """Return the smallest probability with which a class is in a prediction set (:mod:`.decide`).

        Raises:
            UsageError: If ``coverage`` is not in (0, 1), or n is too small for it.
        """
        check_rates(len(self), coverage=coverage)
        return self.label_probabilities[len(self) - conformal_rank(coverage, len(self))].item()

    def tensors(self) -> dict[str, Tensor]:
        """Return the scores by name, for a safetensors file; OOD scores are negated: of a density, log densities."""
        return {
            "scores": -self.ood_scores.flip(0),
            "entropies": self.entropies,
            "error_bounds": self.error_bounds,
            "label_probabilities": self.label_probabilities,
            "labels": self.labels,
            "num_classes": torch.tensor(self.num_classes),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Calibration:
        """Return the calibration whose :meth:`tensors` these are.

        Raises:
            BundleError: If a tensor is missing, has another type or length, or its scores do not ascend or are not
                finite.
        """
        check_names(tensors, {"scores", "entropies", "error_bounds", "label_probabilities", "labels", "num_classes"})
        scores = [tensors[name] for name in ("scores", "entropies", "label_probabilities")]
        labels, classes = tensors["labels"], tensors["num_classes"]
        check_ascending(scores)
        if labels.shape != scores[0].shape:
            raise BundleError(
                f"expected a label for each of {len(scores[0])} calibration images, got labels of shape "
                f"{tuple(labels.shape)}; fit it again"
            )
        if classes.dtype != torch.int64 or classes.ndim:
            raise BundleError(f"expected one int64 num_classes of the calibration, got {classes.dtype} {classes.shape}")
        if labels.dtype != torch.int64 or labels.min() < 0 or labels.max() >= classes:
            raise BundleError(
                f"expected int64 calibration labels 0 … {int(classes) - 1}, got {labels.dtype} "
                f"{int(labels.min())} … {int(labels.max())}; fit it again"
            )
        bounds = tensors["error_bounds"]
        if bounds.dtype != torch.float32 or bounds.shape != scores[0].shape or not bool(bounds.isfinite().all()):
            raise BundleError(
                f"expected float32 error_bounds, one for each of {len(scores[0])} calibration images, got "
                f"{bounds.dtype} of shape {tuple(bounds.shape)}, or some that are not finite; fit it again"
            )
        limits = ((-MAX_SCORE, MAX_SCORE), (0.0, math.log(max(int(classes), 1))), (0.0, 1.0), (0.0, 1.0))
        names = ("scores", "entropies", "label_probabilities", "error_bounds")
        for name, part, (low, high) in zip(names, (*scores, bounds), limits, strict=True):
            check_range(name, part, low, high, rounding=FLOAT32_ROUNDING)
        return cls(-scores[0].flip(0), scores[1], bounds, scores[2], labels, int(classes))
