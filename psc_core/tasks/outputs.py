"""The outputs of a network step for n images, packed into one matrix so that one copy brings them to the host.

Columns: one for each score of the task, in the order of its ``SCORES``, then K probabilities, then the p-value of each
gate; float32, (n, S + K + G).  K is 0 for a task without probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

FloatArray = npt.NDArray[np.float32]

Matrix = TypeVar("Matrix", Tensor, FloatArray)


@dataclass(frozen=True)
class Outputs(Generic[Matrix]):
    """A packed matrix, read by name.

    Example:
        >>> scores = {"log_density": torch.tensor([-9.0])}
        >>> outputs = Outputs(pack(["log_density"], scores, torch.tensor([[0.3, 0.7]])), ["log_density"], ())
        >>> outputs["log_density"], outputs.probabilities
        (tensor([-9.]), tensor([[0.3000, 0.7000]]))
    """

    packed: Matrix  # float32 (n, S + K + G)
    scores: Sequence[str]  # names of its scores
    gates: Sequence[str]  # names of the model's gates

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, score: str) -> Matrix:
        """Return a view of the column of one score, (n,)."""
        return self.packed[:, self.scores.index(score)]

    @property
    def probabilities(self) -> Matrix:
        """A view of the class probabilities, (n, K)."""
        return self.packed[:, len(self.scores) : self.packed.shape[1] - len(self.gates)]

    @property
    def gate_p_values(self) -> Matrix:
        """A view of the p-values of the gates, (n, G)."""
        return self.packed[:, self.packed.shape[1] - len(self.gates) :]


def pack(
    names: Sequence[str],
    scores: Mapping[str, Float[Tensor, " batch"]],
    probabilities: Float[Tensor, "batch classes"],
    gate_p_values: Sequence[Float[Tensor, "batch gates"]] = (),
) -> Float[Tensor, "batch columns"]:
    """Return the packed matrix; ``scores`` has an entry for each of ``names``, ``gate_p_values`` at most one."""
    return torch.cat([*(scores[name][:, None] for name in names), probabilities, *gate_p_values], dim=1)
