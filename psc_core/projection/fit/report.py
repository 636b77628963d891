"""A fitted projection, and the measurements that chose its sizes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from psc_core.projection.fit.projection import SizedProjection
from psc_core.projection.fit.ranks import RankChoice
from psc_core.projection.module import Projection


@dataclass(frozen=True)
class ProjectionReport:
    """The chosen sizes, and the measurements that they were chosen from."""

    choice: RankChoice
    scaled_nc1: float  # of the scaled, unprojected layer
    scaled_nc4: float
    nc1: Float[Tensor, "c_max d_max"]  # of every size, float64
    nc4: Float[Tensor, "c_max d_max"]
    note: str  # to how many positions the layers were reduced; empty when they were not
    positions: tuple[tuple[int, float], ...] = ()  # spatial components and the density's mean AUROC on made-up images

    @classmethod
    def of(cls, choice: RankChoice, sized: SizedProjection, positions: Mapping[int, float]) -> ProjectionReport:
        """Return the report of a choice among the sizes of ``sized``."""
        return cls(
            choice, sized.scaled_nc1, sized.scaled_nc4, sized.nc1, sized.nc4, sized.note, tuple(positions.items())
        )

    def summary(self, raw_nc4: float | None) -> str:
        """Return lines for the terminal: the choice, the scaled layer, and the raw one where its NC4 is known."""
        choice, raw = self.choice, "" if raw_nc4 is None else f", raw {raw_nc4:.4f}"
        lines = [
            f"projection {choice.c_proj} × {choice.d_proj}: NC1 {choice.nc1:.3f} (scaled layer "
            f"{self.scaled_nc1:.3f}), NC4 {choice.nc4:.4f} (scaled layer {self.scaled_nc4:.4f}{raw})"
        ]
        if self.positions:
            found = ", ".join(f"{d} {value:.4f}" for d, value in self.positions)
            lines.append(f"density on made-up images by spatial components (mean AUROC): {found}")
        lines += [f"note: {text}" for text in (self.note, choice.warning) if text]
        return "\n".join(lines)


@dataclass(frozen=True)
class FittedProjection:
    """A projection, its report, and the layers that it reads."""

    projection: Projection
    report: ProjectionReport
    layers: tuple[str, ...]
