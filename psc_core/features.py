"""Feature matrices, read in blocks of rows from a tensor or a scratch file, so that n rows need not fit in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from psc_core.errors import FitError

CHUNK_ELEMENTS: Final = 1 << 18  # number of entries of one float64 block (2 MiB), which stays in a core's cache


@dataclass(eq=False)
class FeatureMatrix:
    """An n × d matrix of features; indexing it with a slice or ``int64`` positions reads these rows as a tensor."""

    read: Callable[[slice | Tensor], Tensor]
    shape: tuple[int, int]
    dtype: torch.dtype
    device: torch.device  # of the tensors that are returned
    widest: int  # columns of the widest intermediate matrix of a read, which bounds the rows of a block

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        return self.read(index if isinstance(index, slice) else index.cpu())  # labels on a GPU give positions there

    def map(self, function: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> FeatureMatrix:
        """Return the matrix ``function(block)``, computed when a block is read."""
        shape, widest = (len(self), columns), max(self.widest, columns)
        return FeatureMatrix(lambda at: function(self[at]), shape, dtype, self.device, widest)

    def columns(self, first: int, count: int) -> FeatureMatrix:
        """Return ``count`` columns from ``first`` on, sliced when a block is read."""
        return self.map(lambda part: part[:, first : first + count], count, self.dtype)

    def take(self, positions: Int[Tensor, " m"]) -> FeatureMatrix:
        """Return the rows at ``positions``, in that order."""
        shape, positions = (len(positions), self.shape[1]), positions.cpu()
        return FeatureMatrix(lambda at: self[positions[at]], shape, self.dtype, self.device, self.widest)

    def to(self, device: torch.device | str) -> FeatureMatrix:
        """Return the same rows, copied to ``device`` when they are read."""
        target = torch.device(device)
        return FeatureMatrix(lambda at: self[at].to(target), self.shape, self.dtype, target, self.widest)


KEPT: Final = 4  # 1 / the part of the memory budget that features of all training images may take


class KeptFeatures:
    """The features of some layers for all images, from a pass that computed them anyway, where memory allows."""

    def __init__(self, images: int, max_memory: int, device: torch.device) -> None:
        self._images, self._room, self._device = images, max_memory // KEPT, device
        self._layers: dict[str, Tensor] = {}
        self._seen: dict[str, int] = {}  # images whose features are there

    def make_room(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Keep these layers and no others, the last first, each (channels, positions), as far as there is room."""
        free, layers = self._room, self._layers
        self._layers = {}
        for name, shape in reversed([*shapes.items()]):
            size = 4 * self._images * math.prod(shape)
            if size <= free:
                free -= size
                there = layers.get(name)
                self._layers[name] = torch.empty(self._images, *shape, device=self._device) if there is None else there
                self._seen[name] = 0 if there is None else self._seen[name]

    def of(self, layers: Sequence[str]) -> KeptLayers:
        return KeptLayers(self, tuple(layers))

    def add(self, name: str, positions: Int[Tensor, " batch"], features: Tensor) -> None:
        if name in self._layers and self._seen[name] < self._images:
            self._layers[name][positions.to(self._device)] = features.float()
            self._seen[name] += len(positions)

    def get(self, name: str, positions: Int[Tensor, " batch"]) -> Tensor | None:
        is_whole = name in self._layers and self._seen[name] == self._images
        return self._layers[name][positions.to(self._device)] if is_whole else None


@dataclass(frozen=True)
class KeptLayers:
    """The kept features of the layers that a network is cut behind; images are given by their positions."""

    kept: KeptFeatures
    names: tuple[str, ...]

    def add(self, positions: Int[Tensor, " batch"], features: Sequence[Tensor]) -> None:
        """Keep features of a batch, of the layers that there is room for."""
        for name, each in zip(self.names, features, strict=True):
            self.kept.add(name, positions, each)

    def get(self, positions: Int[Tensor, " batch"]) -> list[Tensor] | None:
        """Return the features of each layer; None unless a whole pass has kept those of all layers."""
        found = [each for name in self.names if (each := self.kept.get(name, positions)) is not None]
        return found if len(found) == len(self.names) else None


def as_matrix(rows: Float[Tensor, "n d"] | npt.NDArray[np.float32] | FeatureMatrix) -> FeatureMatrix:
    """Return a tensor, or an array in a scratch file, as a feature matrix; of an array only what is read is copied."""
    if isinstance(rows, FeatureMatrix):
        return rows
    n, d = rows.shape
    if isinstance(rows, Tensor):
        return FeatureMatrix(rows.__getitem__, (n, d), rows.dtype, rows.device, d)

    def read(index: slice | Tensor) -> Tensor:
        return torch.from_numpy(rows[index if isinstance(index, slice) else index.numpy()]).clone()

    return FeatureMatrix(read, (n, d), torch.float32, torch.device("cpu"), d)


def side_by_side(parts: Sequence[FeatureMatrix], *, widest: int) -> FeatureMatrix:
    """Return the columns of several matrices as one, joined when a block is read, with its ``widest``."""

    def read(index: slice | Tensor) -> Tensor:
        return torch.cat([part[index] for part in parts], dim=1)

    shape = (len(parts[0]), sum(part.shape[1] for part in parts))
    return FeatureMatrix(read, shape, parts[0].dtype, parts[0].device, widest)


def chunk_rows(rows: int, columns: int) -> Iterator[slice]:
    """Return slices of at most :data:`CHUNK_ELEMENTS` ``// columns`` rows that cover ``rows``."""
    step = max(1, CHUNK_ELEMENTS // max(1, columns))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def blocks(
    rows: Float[Tensor, "n d"] | FeatureMatrix, *, columns: int = 0
) -> Iterator[tuple[slice, Float[Tensor, "m d"]]]:
    """Yield ``rows`` block by block with their slices; ``columns`` is the width of results computed from a block."""
    rows = as_matrix(rows)
    for chunk in chunk_rows(len(rows), max(columns, rows.widest)):
        yield chunk, rows[chunk]


def check_features(
    z: Float[Tensor, "n dim"] | FeatureMatrix,
    labels: Int[Tensor, " n"],
    *,
    num_classes: int,
    class_names: Sequence[str] | None,
    minimum: int,
    images: Int[Tensor, " n"] | None = None,
) -> Int[Tensor, " classes"]:
    """Check that a model can be fitted to these features, and count the labelled examples of each class.

    Every class must have ``minimum`` images, by default a different one for each row of ``z``.
    """
    if len(z.shape) != 2 or labels.shape != z.shape[:1] or not z.dtype.is_floating_point or z.shape[1] == 0:
        raise FitError(
            f"expected float features (n, dim) and n labels, got {z.dtype} {tuple(z.shape)} and {tuple(labels.shape)}"
        )
    if len(z) == 0:
        raise FitError("no features to fit; give a non-empty data set")
    if labels.min() < 0 or labels.max() >= num_classes:
        raise FitError(
            f"expected labels 0 … {num_classes - 1}, got {int(labels.min())} … {int(labels.max())}; "
            "check the number of classes"
        )
    if not all(bool(block.isfinite().all()) for _, block in blocks(z)):
        raise FitError("expected finite features, got NaN or ∞; check the network's weights and precision")
    counts = torch.bincount(labels, minlength=num_classes)
    names = class_names or [str(k) for k in range(num_classes)]
    seen = counts if images is None else images_of_classes(images, labels, num_classes)
    short = [f"{names[i]!r} ({int(seen[i])})" for i in (seen < minimum).nonzero()[:, 0].tolist()]
    if short:
        shown = ", ".join(short[:10]) + (f" and {len(short) - 10} more" if len(short) > 10 else "")
        raise FitError(
            f"expected at least {minimum} image{'s' * (minimum > 1)} of every class, got {shown}; "
            "add images or leave the class out"
        )
    return counts


def images_of_classes(
    images: Int[Tensor, " n"], labels: Int[Tensor, " n"], num_classes: int
) -> Int[Tensor, " classes"]:
    """Count the distinct images of each label; an image that has a label several times counts once."""
    span = int(images.max()) + 1
    return torch.bincount(torch.unique(labels * span + images) // span, minlength=num_classes)


def usable(
    examples: Shaped[Tensor, "n ..."], labels: Int[Tensor, " n"]
) -> tuple[Shaped[Tensor, "m ..."], Int[Tensor, " m"], int]:
    """Return the examples of classes with two or more, which have a covariance, their new labels, and the new K."""
    enough = labels.bincount() >= 2
    keep = enough[labels]
    return examples[keep], (enough.cumsum(0) - 1)[labels[keep]], int(enough.sum())
