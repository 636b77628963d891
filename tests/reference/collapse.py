"""Naive float64 twins of ``psc_core.linalg`` and ``psc_core.collapse``: one row at a time."""

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
    return sum(hits(train, train_labels, val, val_labels, classes)) / len(val_labels)


def hits(train: Array, train_labels: Sequence[int], val: Array, val_labels: Sequence[int], classes: int) -> list[bool]:
    """For each validation row whether the nearest class mean is that of its label."""
    means = class_means(train, train_labels, classes)
    correct = []
    for row, label in zip(val, val_labels, strict=True):
        distances = [float(((row - mean) ** 2).sum()) for mean in means]
        correct.append(int(np.argmin(distances)) == label)
    return correct


def paired_error(one: Sequence[bool], other: Sequence[bool], images: Sequence[int]) -> float:
    """Standard error of the difference between two NC4s; rows of equal ``images`` belong to one image."""
    squares = 0
    for image in sorted(set(images)):
        rows = [row for row, owner in enumerate(images) if owner == image]
        squares += sum(one[row] - other[row] for row in rows) ** 2
    return float(np.sqrt(squares)) / len(images)


def choose(nc1s: Sequence[float], nc4s: Sequence[float], errors: Sequence[float], epsilon: float) -> int:
    """Position of the deepest layer with NC1 > ε and NC4 within its error of the highest; at least one passes."""
    highest = max(nc4 for nc1, nc4 in zip(nc1s, nc4s, strict=True) if nc1 > epsilon)
    for depth in reversed(range(len(nc1s))):
        if nc1s[depth] > epsilon and highest - nc4s[depth] <= errors[depth]:
            return depth
    raise ValueError("no layer passes")
