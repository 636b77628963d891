"""Naive float64 twins of ``psc_core.linalg``."""

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def mean_of_rows(rows: Array) -> Array:
    return np.asarray([sum(column) / len(column) for column in rows.T])


def scatter_about(rows: Array, mean: Array) -> Array:
    total = np.zeros((rows.shape[1], rows.shape[1]))
    for row in rows:
        total += np.outer(row - mean, row - mean)
    return total


def inverse_root(matrix: Array, minimum: float) -> tuple[Array, float, int]:
    """C^(−1/2), log det C and the number of clamped eigenvalues, one eigenvalue at a time."""
    values, vectors = np.linalg.eigh(matrix)
    root, log_det, n_clamped = np.zeros_like(matrix), 0.0, 0
    for value, vector in zip(values, vectors.T, strict=True):
        clamped = max(float(value), minimum)
        root += np.outer(vector, vector) / np.sqrt(clamped)
        log_det += float(np.log(clamped))
        n_clamped += clamped > value
    return root, log_det, n_clamped


def oas_shrinkage(matrix: Array, samples: int) -> tuple[Array, float]:
    """Chen, Wiesel, Eldar & Hero 2010, equation 23, entry by entry."""
    d = len(matrix)
    trace = sum(float(matrix[i, i]) for i in range(d))
    trace_of_square = sum(float(matrix[i, j] * matrix[j, i]) for i in range(d) for j in range(d))
    numerator = (1 - 2 / d) * trace_of_square + trace**2
    denominator = (samples + 1 - 2 / d) * (trace_of_square - trace**2 / d)
    rho = 1.0 if denominator <= 0 else min(1.0, numerator / denominator)
    return (1 - rho) * matrix + rho * trace / d * np.eye(d), rho
