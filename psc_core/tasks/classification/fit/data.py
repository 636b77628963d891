"""The data to which a classifier's head is fitted."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from psc_core.numerics.matrix import FeatureMatrix
from psc_core.tasks.fit.standardisation import Standardisation


@dataclass(frozen=True)
class HeadData:
    """Standardised features: float64 ones to fit to (train), float32 ones to choose hyperparameters by (val)."""

    train: FeatureMatrix
    train_labels: Int[Tensor, " n"]
    weights: Float[Tensor, " n"]  # 1 / labels of its image, so that every image is one observation
    val: Float[Tensor, "m dim"]
    val_labels: Int[Tensor, " m"]
    num_classes: int
    seed: int
    standardisation: Standardisation
