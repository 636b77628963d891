"""The data to which a classifier's head is fitted."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor

from psc_core.tasks.fit.standardisation import HeadData


@dataclass(frozen=True, kw_only=True)
class ClassifierData(HeadData):
    """Standardised features and class indices; the features of the selection split are float32."""

    train_labels: Int[Tensor, " n"]
    weights: Float[Tensor, " n"]  # 1 / labels of its image, so that every image is one observation
    selection_labels: Int[Tensor, " m"]
    num_classes: int
