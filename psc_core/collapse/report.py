"""Every layer's collapse in one table, and the rule that picks the candidate layer(s) from it.

The rule (paper, section 4.1): among the layers whose features still vary within a class, NC1 > ε, take the one
whose nearest class mean is most often right, the highest NC4; the deepest of equals.  When NC1 of that layer or
of the next one is within :data:`NEAR` of ε and both have as many channels, take both: the layers before and
after collapse.  The logits are measured but never chosen.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any, Final

from psc_core.errors import UsageError

EPSILON: Final = 0.2
"""Neural collapse cutoff ε on NC1, the paper's."""

NEAR: Final = 0.05
"""How close to ε NC1 must be for two layers to be combined."""


@dataclass(frozen=True)
class LayerCollapse:
    """Collapse measured after one layer.

    Attributes:
        name: Layer name.
        index: Position in execution order.
        kind: ``map``, ``map_last``, ``tokens`` or ``vector``.
        shape: Canonical (channels, spatial).
        grid: The spatial axis unrolled.
        role: ``hidden``, ``penultimate`` or ``output``.
        nc1: Tr(Σ_W)/Tr(Σ_T) on the training rows: 1 no class structure, 0 collapsed.
        nc4: Share of the validation rows whose nearest class mean is their label.
    """

    name: str
    index: int
    kind: str
    shape: tuple[int, int]
    grid: tuple[int, ...]
    role: str
    nc1: float
    nc4: float


@dataclass(frozen=True)
class Candidate:
    """The layer(s) a PSC reads.

    Attributes:
        layers: One or two layer names, in execution order.
        reason: Why these, one sentence with the numbers.
    """

    layers: tuple[str, ...]
    reason: str


@dataclass(frozen=True)
class CollapseReport:
    """Collapse of every measured layer.

    Attributes:
        layers: In execution order.
        epsilon: Neural collapse cutoff ε on NC1.
        granularity: Which modules were listed.
        pattern: Regular expression the candidate's name must match; ``None`` for any.
        train_rows: Rows NC1 was measured on.
        val_rows: Rows NC4 was measured on.
        notes: What a reader should know about these data.
    """

    layers: tuple[LayerCollapse, ...]
    epsilon: float
    granularity: str
    pattern: str | None
    train_rows: int
    val_rows: int
    notes: tuple[str, ...] = ()

    @property
    def penultimate(self) -> str:
        """The layer the logits are computed from, which DDU uses."""
        return next(layer.name for layer in self.layers if layer.role == "penultimate")

    def layer(self, name: str) -> LayerCollapse:
        """The measurement of one layer.

        Raises:
            UsageError: It was not measured.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = [layer.name for layer in self.layers]
        near = get_close_matches(name, names, n=3) or names[-4:]
        raise UsageError(f"expected one of the measured layers, got {name!r}; some are {', '.join(near)}")

    def candidate(self, layer: str | None = None) -> Candidate:
        """Choose by the module's rule, or take ``layer`` as named.

        Raises:
            UsageError: ``layer`` was not measured, or the pattern leaves no layer to choose from.
        """
        if layer is not None:
            return Candidate((layer,), f"{_numbers(self.layer(layer))}, named by the caller")
        matcher = re.compile(self.pattern or "")
        eligible = [entry for entry in self.layers if entry.role != "output" and matcher.search(entry.name)]
        if not eligible:
            raise UsageError(f"expected a layer before the output, {self.pattern!r} leaves none; widen the pattern")
        passing = [entry for entry in eligible if entry.nc1 > self.epsilon]
        if not passing:
            least = max(eligible, key=lambda entry: (entry.nc1, entry.nc4, entry.index))
            return Candidate(
                (least.name,),
                f"no layer has NC1 > {self.epsilon:g}, all have collapsed; took the least collapsed one, "
                f"{_numbers(least)}: expect OOD detection no better than at the penultimate layer",
            )
        best = max(passing, key=lambda entry: (entry.nc4, entry.index))
        reason = f"{_numbers(best)}, has the highest NC4 of the {len(passing)} layers with NC1 > {self.epsilon:g}"
        following = next((entry for entry in eligible if entry.index > best.index), None)
        if following is None or following.shape[0] != best.shape[0] or not (self._near(best) or self._near(following)):
            return Candidate((best.name,), reason)
        return Candidate(
            (best.name, following.name),
            f"{reason}; the next layer, {_numbers(following)}, joins it: NC1 is within {NEAR:g} of {self.epsilon:g} "
            f"and both have {best.shape[0]} channels",
        )

    def nc4_of(self, candidate: Candidate) -> float:
        """NC4 of the candidate's layer; the better one of two."""
        return max(self.layer(name).nc4 for name in candidate.layers)

    def _near(self, entry: LayerCollapse) -> bool:
        return abs(entry.nc1 - self.epsilon) <= NEAR + 1e-12

    # -- forms --------------------------------------------------------------------------------------------

    def table(self, candidate: Candidate | None = None) -> str:
        """Every layer's numbers as aligned text, the candidate (by default the rule's) marked, the reason below."""
        chosen = candidate or self.candidate()
        width = max(len("layer"), *(len(entry.name) for entry in self.layers))
        lines = [f"{'#':>4}  {'layer':<{width}}  {'kind':<8}  {'channels×spatial':>16}  {'NC1':>7}  {'NC4':>7}"]
        for entry in self.layers:
            marks = ["◀ candidate"] if entry.name in chosen.layers else []
            marks += [entry.role] if entry.role != "hidden" else []
            size = f"{entry.shape[0]}×{entry.shape[1]}"
            numbers = f"{entry.nc1:7.4f}  {entry.nc4:7.4f}"
            line = f"{entry.index:>4}  {entry.name:<{width}}  {entry.kind:<8}  {size:>16}  {numbers}"
            lines.append("  ".join([line, *marks]))
        lines.append(f"candidate: {chosen.reason}")
        if self.penultimate not in chosen.layers:
            lines.append(f"penultimate: {_numbers(self.layer(self.penultimate))}, for comparison (DDU)")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_csv(self) -> str:
        """One line a layer, with a header."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["index", "layer", "kind", "channels", "spatial", "role", "nc1", "nc4"])
        for entry in self.layers:
            writer.writerow([entry.index, entry.name, entry.kind, *entry.shape, entry.role, entry.nc1, entry.nc4])
        return text.getvalue()

    def to_json(self) -> dict[str, Any]:
        """The attributes as JSON types."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollapseReport:
        """Inverse of :meth:`to_json`."""
        layers = tuple(
            LayerCollapse(**{**entry, "shape": tuple(entry["shape"]), "grid": tuple(entry["grid"])})
            for entry in data["layers"]
        )
        return cls(**{**data, "layers": layers, "notes": tuple(data["notes"])})


def _numbers(entry: LayerCollapse) -> str:
    return f"{entry.name} (NC1 {entry.nc1:.4f}, NC4 {entry.nc4:.4f})"
