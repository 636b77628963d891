"""Feature rows that need not be in memory: read a block at a time, from a tensor or from a scratch file.

Everything that is fitted to z reads it through :class:`Rows`, in blocks; memory does not grow with their number.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

Read = Callable[[slice | Tensor], Tensor]


class Rows:
    """``n`` rows of ``d`` columns; indexing with a slice or ``int64`` positions gives a tensor.

    Attributes:
        shape: ``(n, d)``.
        widest: Columns of the widest rows that reading goes through, which bounds a block.
        dtype: Of the rows.
        device: Where the rows come to.
    """

    def __init__(
        self, read: Read, shape: tuple[int, int], *, dtype: torch.dtype, device: torch.device, widest: int = 0
    ) -> None:
        self._read = read
        self.shape = shape
        self.widest = max(widest, shape[1])
        self.dtype = dtype
        self.device = device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        return self._read(index)

    def map(self, function: Callable[[Tensor], Tensor], columns: int, dtype: torch.dtype) -> Rows:
        """``function`` of each block, computed when it is read."""
        read = self._read
        shape = (len(self), columns)
        return Rows(lambda at: function(read(at)), shape, dtype=dtype, device=self.device, widest=self.widest)

    def take(self, positions: Int[Tensor, " m"]) -> Rows:
        """The rows at ``positions``, in that order."""
        read = self._read
        shape = (len(positions), self.shape[1])
        return Rows(lambda at: read(positions[at]), shape, dtype=self.dtype, device=self.device, widest=self.widest)

    def to(self, device: torch.device | str) -> Rows:
        """The same rows, brought to ``device`` when they are read."""
        read, target = self._read, torch.device(device)
        return Rows(lambda at: read(at).to(target), self.shape, dtype=self.dtype, device=target, widest=self.widest)


def as_rows(rows: Float[Tensor, "n d"] | Rows) -> Rows:
    """A tensor as rows, without a copy."""
    if isinstance(rows, Rows):
        return rows
    return Rows(rows.__getitem__, (rows.shape[0], rows.shape[1]), dtype=rows.dtype, device=rows.device)


class ScratchRows(Rows):
    """Rows in a file, ``float32``, on the CPU; pages are given back to the system as soon as they are read.

    Args:
        file: Created, or overwritten.
        shape: ``(n, d)``.
    """

    def __init__(self, file: Path, shape: tuple[int, int]) -> None:
        super().__init__(self._copy, shape, dtype=torch.float32, device=torch.device("cpu"))
        with file.open("w+b") as handle:
            handle.truncate(max(1, 4 * shape[0] * shape[1]))
            self._map = mmap.mmap(handle.fileno(), 0)
        array = np.frombuffer(self._map, np.float32, count=shape[0] * shape[1]).reshape(shape)
        self._tensor = torch.from_numpy(array)

    def _copy(self, index: slice | Tensor) -> Tensor:
        values = self._tensor[index]
        if isinstance(index, slice):
            values = values.clone()
        self._give_back()
        return values

    def write(self, index: slice | Tensor, values: Float[Tensor, "m d"]) -> None:
        """Set the rows at ``index``."""
        self._tensor[index] = values
        self._give_back()

    def _give_back(self) -> None:
        if hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # the file keeps what was written
