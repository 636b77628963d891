"""Compute NC1 and NC4 of every (c_proj, d_proj) from one pass over the largest projection, and choose a size.

With Z (B, c_max, d_max) the largest projection, a smaller one keeps its leading block, so

    NC1(c, d) = Σ_{i<c, j<d} w_ij / Σ_{i<c, j<d} t_ij
    NC4(c, d) = accuracy of  argmin_k Σ_{i<c, j<d} (z_ij − μ_kij)²

where w and t are the within-class and total scatter of one coordinate (:mod:`psc_core.numerics.scatter`).
Two cumulative sums replace the sweep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.numerics.linalg import DEAD_UNIT
from psc_core.numerics.matrix import chunk_rows
from psc_core.settings import FitSettings

NC4_LOSS: Final = 0.01
"""Largest loss of NC4 that a smaller size may cost."""

MUCH_NC4: Final = 0.05
"""A loss of NC4 that is more than noise: several of its standard errors."""


def nc1_prefixes(
    within: Float[Tensor, "c_max d_max"], total: Float[Tensor, "c_max d_max"]
) -> Float[Tensor, "c_max d_max"]:
    """Return NC1 of every leading block; entry [c − 1, d − 1] is that of (c, d)."""
    return within.cumsum(0).cumsum(1) / total.cumsum(0).cumsum(1).clamp_min(torch.finfo(torch.float64).tiny)


def nearest_mean_hits(
    z: Float[Tensor, "n c_max d_max"], means: Float[Tensor, "classes c_max d_max"], labels: Int[Tensor, " n"]
) -> Int[Tensor, "c_max d_max"]:
    """Return the number of labelled examples whose nearest class mean is right, for every leading block."""
    z, means = z.double(), means.double()
    hits = torch.zeros(z.shape[1:], dtype=torch.int64, device=z.device)
    for chunk in chunk_rows(len(z), means.numel()):
        distances = (z[chunk, None] - means).square_().cumsum(2).cumsum(3)
        hits += (distances.argmin(1) == labels[chunk, None, None]).sum(0)
    return hits


@dataclass(frozen=True)
class RankChoice:
    """The chosen sizes of a projection, and NC1 and NC4 of z with these sizes."""

    c_proj: int
    d_proj: int
    nc1: float
    nc4: float
    warning: str  # what a user should know about the choice; empty where nothing is wrong

    def with_more_positions(
        self,
        nc1: Float[Tensor, "c_max d_max"],
        nc4: Float[Tensor, "c_max d_max"],
        deviation: Float[Tensor, "c_max d_max"],
        *,
        epsilon: float,
    ) -> list[RankChoice]:
        """Return this choice, and those with two, four, … times its spatial components that keep NC1 > ε and its NC4.

        None of their components deviates by less than :data:`.DEAD_UNIT` of the root mean square: the second scaling
        would raise its rounding errors.
        """
        found = [self]
        floor = DEAD_UNIT * deviation.square().mean().sqrt()
        d_proj = 2 * self.d_proj
        while d_proj < 2 * nc1.shape[1]:
            column = min(d_proj, nc1.shape[1]) - 1
            here = float(nc1[self.c_proj - 1, column]), float(nc4[self.c_proj - 1, column])
            if (
                here[0] > epsilon
                and here[1] >= self.nc4 - NC4_LOSS
                and deviation[: self.c_proj, : column + 1].min() >= floor
            ):
                found.append(replace(self, d_proj=column + 1, nc1=here[0], nc4=here[1]))
            d_proj *= 2
        return found


def choose_ranks(
    nc1: Float[Tensor, "c_max d_max"],
    nc4: Float[Tensor, "c_max d_max"],
    reference_nc4: float,
    settings: FitSettings,
) -> RankChoice:
    """Choose the smallest c·d with NC1 > ε and NC4 ≥ ``reference_nc4`` − :data:`NC4_LOSS`, on a tie by NC4.

    Where no size satisfies both, the one with the best NC4 among those with NC1 > ε (or among all) is taken; but where
    that gives up :data:`MUCH_NC4` of what collapsed sizes keep, the smallest that keeps it.  The warning says so.

    Args:
        nc1: NC1 of every leading block.
        nc4: NC4 of every leading block.
        reference_nc4: NC4 of the scaled, unprojected layer.
        settings: With ε, the components that are fixed, and the smallest c·d that is considered, or the largest there
            is where that is smaller.
    """
    epsilon, c_proj, d_proj = settings.epsilon, settings.c_proj, settings.d_proj
    c_max, d_max = nc1.shape
    c = torch.arange(1, c_max + 1)[:, None].expand(c_max, d_max)
    d = torch.arange(1, d_max + 1)[None, :].expand(c_max, d_max)
    size = (c * d).double()
    nc1, nc4 = nc1.cpu().double(), nc4.cpu().double()
    allowed = torch.ones_like(nc1, dtype=torch.bool)
    if c_proj is not None:
        allowed &= c == c_proj
    if d_proj is not None:
        allowed &= d == d_proj
    allowed &= size >= min(settings.minimum_dim, int(size[allowed].max()))
    uncollapsed = allowed & (nc1 > epsilon)
    kept = uncollapsed & (nc4 >= reference_nc4 - NC4_LOSS)
    found = []
    cost = size - nc4  # NC4 ≤ 1 only breaks ties between equal sizes
    if bool(kept.any()):
        pick = int(torch.where(kept, cost, torch.inf).argmin())
    else:
        candidates = uncollapsed if bool(uncollapsed.any()) else allowed
        pick = int(torch.where(candidates, nc4 - 1e-9 * size, -torch.inf).argmax())
        above, most = float(nc4.view(-1)[pick]), min(reference_nc4, float(nc4[allowed].max()))
        taken = "the best NC4"
        if most - above > MUCH_NC4:
            pick = int(torch.where(allowed & (nc4 >= most - NC4_LOSS), cost, torch.inf).argmin())
            taken = f"a collapsed one, NC1 > {epsilon} gives up {reference_nc4 - above:.3f} of NC4"
        if c_proj is None or d_proj is None:
            found.append(
                f"no projection of at most {c_max}×{d_max} keeps NC1 > {epsilon} and NC4 within {NC4_LOSS} "
                f"of {reference_nc4:.3f}: took {taken}"
            )
    row, column = divmod(pick, d_max)
    lost = reference_nc4 - float(nc4[row, column])
    if lost > MUCH_NC4:
        found.append(f"the projection gives up {lost:.3f} of NC4: {_remedy(nc1, nc4, reference_nc4, lost)}")
    return RankChoice(row + 1, column + 1, float(nc1[row, column]), float(nc4[row, column]), "; ".join(found))


def _remedy(nc1: Tensor, nc4: Tensor, reference_nc4: float, lost: float) -> str:
    """Return the flags that keep more of NC4 than a choice that loses ``lost`` of it."""
    size = torch.arange(1, nc1.shape[0] + 1)[:, None] * torch.arange(1, nc1.shape[1] + 1)
    enough = nc4 >= min(reference_nc4, float(nc4.max())) - NC4_LOSS
    row, column = divmod(int(torch.where(enough, size, torch.inf).argmin()), nc1.shape[1])
    left = max(0.0, reference_nc4 - float(nc4[row, column]))
    if lost - left <= NC4_LOSS:
        return "no size keeps more; choose another layer of the table by --layer"
    return (
        f"--c-proj {row + 1} --d-proj {column + 1} give up {left:.3f}, with NC1 {float(nc1[row, column]):.3f}, "
        "and --layer reads another layer"
    )
