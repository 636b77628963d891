"""The collapse of every layer in one report: as text, CSV and JSON."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from typing import Any

from psc_core.collapse.candidate import Candidate, LayerCollapse, choose_candidate, describe
from psc_core.errors import UsageError


@dataclass(frozen=True)
class CollapseReport:
    """Neural collapse of every measured layer.

    Attributes:
        layers: In execution order.
        epsilon: Neural collapse cutoff ε on NC1.
        granularity: Which modules were measured, see :mod:`psc_core.network.layers`.
        pattern: Regular expression that the candidate's name must match; ``None`` for any.
        train_rows: Number of labelled examples that NC1 was measured on.
        val_rows: Number of labelled examples that NC4 was measured on.
        notes: Remarks on the data.
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
        """The layer that the logits are computed from, which DDU uses."""
        return next(layer.name for layer in self.layers if layer.role == "penultimate")

    def layer(self, name: str) -> LayerCollapse:
        """The measurement of one layer.

        Raises:
            UsageError: The layer was not measured.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = [layer.name for layer in self.layers]
        near = get_close_matches(name, names, n=3) or names[-4:]
        raise UsageError(f"expected one of the measured layers, got {name!r}; some are {', '.join(near)}")

    def candidate(self, layer: str | None = None) -> Candidate:
        """The candidate by :func:`psc_core.collapse.candidate.choose_candidate`, or the layer that the caller names.

        Raises:
            UsageError: ``layer`` was not measured, or no layer matches the pattern.
        """
        if layer is not None:
            return Candidate((layer,), f"{describe(self.layer(layer))}, named by the caller")
        return choose_candidate(self.layers, epsilon=self.epsilon, pattern=self.pattern)

    def nc4_of(self, candidate: Candidate) -> float:
        """NC4 of the candidate's layer; the higher one of two."""
        return max(self.layer(name).nc4 for name in candidate.layers)

    def table(self, candidate: Candidate | None = None) -> str:
        """A table of all layers with the candidate marked (by default the rule's) and its reason below."""
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
            lines.append(f"penultimate: {describe(self.layer(self.penultimate))}, for comparison (DDU)")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_csv(self) -> str:
        """One line per layer, with a header."""
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
