"""Naive float64 twins of ``psc_core.numerics.scatter`` and ``psc_core.collapse.measure``: one row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def class_means(rows: Array, labels: Sequence[int], classes: int) -> Array:
    means = np.zeros((classes, rows.shape[1]))
    for c in range(classes):
        members = [row for row, label in zip(rows, labels, strict=True) if label == c]
        means[c] = np.sum(members, axis=0, dtype=np.longdouble) / len(members)
    return means


def scatters(rows: Array, labels: Sequence[int], classes: int) -> tuple[float, float]:
    """Σ‖h − μ_c‖² and Σ‖h − μ_G‖²."""
    means = class_means(rows, labels, classes)
    grand = means.mean(axis=0)
    within = sum(float(((row - means[label]) ** 2).sum()) for row, label in zip(rows, labels, strict=True))
    total = sum(float(((row - grand) ** 2).sum()) for row in rows)
    return within, total


def nc1(rows: Array, labels: Sequence[int], classes: int) -> float:
    within, total = scatters(rows, labels, classes)
    return within / total


def nc4(train: Array, train_labels: Sequence[int], val: Array, val_labels: Sequence[int], classes: int) -> float:
    means = class_means(train, train_labels, classes)
    correct = 0
    for row, label in zip(val, val_labels, strict=True):
        distances = [float(((row - mean) ** 2).sum()) for mean in means]
        correct += int(np.argmin(distances)) == label
    return correct / len(val_labels)
