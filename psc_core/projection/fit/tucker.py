"""Decompose the correlation tensor into Tucker factors (paper, section 4.2 and appendix A.2.1).

    R ≈ G ×₁ A ×₂ B ×₃ B        R (C, d, d), A (C, c_max), B (d, d_max)

R is symmetric in its last two modes, so one spatial factor serves both.  The diagonal of each slice is one, so that the
slices span at most d (d − 1) / 2 + 1 dimensions; a column of A beyond what they do span would be rounding alone.  Any
smaller projection keeps leading columns, Z = A[:, :c]ᵀ X B[:, :d'], so that :mod:`.ranks` sees all sizes in one pass.
"""

from __future__ import annotations

import tensorly
import torch
from jaxtyping import Float
from tensorly.decomposition import tucker
from torch import Tensor

from psc_core.numerics import linalg

ITERATIONS = 10
"""Maximum number of higher-order orthogonal iterations; they start near the end, from the truncated HOSVD."""


NO_RANK = 1e-12
"""Eigenvalue of a Gram matrix, relative to the largest, below which it is rounding: an amplitude of a millionth."""


def tucker_factors(
    correlation: Float[Tensor, "channels positions positions"], c_max: int, d_max: int
) -> tuple[Float[Tensor, "channels c_max"], Float[Tensor, "positions d_max"]]:
    """Return the leading factors A and B of the channel and the spatial mode, by tensorly's HOOI in float64.

    The sign of every column is fixed (largest entry positive), so that equal inputs give equal factors.

    Args:
        correlation: (C, d, d), symmetric in its last two modes.
        c_max: Maximum number of columns of A; there are at most C, at most d_max (d_max + 1) / 2, which is what
            symmetric slices span, and no more than these do span.
        d_max: Maximum number of columns of B; there are at most d.
    """
    channels, positions, _ = correlation.shape
    d_max = min(d_max, positions)
    c_max = min(c_max, channels, d_max * (d_max + 1) // 2)
    if channels == 1:
        # One channel: the decomposition is the eigendecomposition of one symmetric matrix.
        values, vectors = torch.linalg.eigh(correlation[0].double().cpu())
        leading = vectors[:, values.abs().argsort(descending=True, stable=True)[:d_max]]
        return correlation.new_ones(1, 1).double(), linalg.fix_signs(leading).to(correlation.device)
    tensor = correlation.double().cpu()
    core, start = truncated_hosvd(tensor, c_max, d_max)
    with tensorly.backend_context("pytorch", local_threadsafe=True):
        _, factors = tucker(
            tensor,
            rank=[*core.shape],
            n_iter_max=ITERATIONS,
            tol=1e-6,
            init=(core, start),
        )
    a, b = (linalg.fix_signs(factor).to(correlation.device) for factor in factors[:2])
    return a, b


def truncated_hosvd(
    tensor: Float[Tensor, "channels positions positions"], c_max: int, d_max: int
) -> tuple[Tensor, list[Tensor]]:
    """Return the start of the iterations: leading eigenvectors of each unfolding's Gram matrix."""
    # A Gram matrix is smaller than the unfolding, whose SVD would give the same vectors.
    channel = tensor.flatten(1) @ tensor.flatten(1).T
    spatial = torch.zeros_like(tensor[0])
    for part in tensor:
        spatial.addmm_(part, part)
    values, vectors = linalg.eigh(channel)
    rank = max(1, int((values > NO_RANK * values[0]).sum()))
    a, b = vectors[:, : min(c_max, rank)], linalg.eigh(spatial).vectors[:, :d_max]
    return tensor.new_zeros(a.shape[1], d_max, d_max), [a, b, b]
