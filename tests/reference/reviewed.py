"""Naive twin of :mod:`psc_core.learnt`, in the features instead of the density's coordinates, with NumPy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def direction(
    basis: Array, proportions: Sequence[float], means: Sequence[Array], covariances: Sequence[Array], unknown: Array
) -> Array:
    """The weights, on coordinates, of a ridge-regularised discriminant on features of unit variance.

    The features are those that coordinates stand for: the point of least norm that has them.
    """
    to_features = np.linalg.pinv(basis)
    mean = sum(p * m for p, m in zip(proportions, means, strict=True))
    total: Any = sum(
        p * (c + np.outer(m - mean, m - mean)) for p, m, c in zip(proportions, means, covariances, strict=True)
    )
    spread = to_features.T @ total @ to_features
    deviation = np.sqrt(np.diag(spread))
    correlation = spread / deviation[:, None] / deviation
    gap = ((unknown.mean(0) - mean) @ to_features) / deviation
    weights = np.linalg.solve(correlation + (1 + 50 / len(unknown)) * np.eye(len(gap)), gap)
    found: Array = (to_features / deviation) @ weights
    return found / np.sqrt(found @ total @ found)
