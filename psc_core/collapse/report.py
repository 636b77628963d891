"""Report neural collapse of every layer, select the candidate layer(s) from it, and print it as tables.

Paper, section 4.1: of the layers whose features still vary within classes, NC1 > ε, take the one with the highest NC4,
where the nearest class mean is right most often.  The selection split decides this up to an error, so of those whose
NC4 is within one paired standard error of the highest, take the deepest.  If the next layer has collapsed, NC1 ≤ ε, if
NC1 of either is within :data:`NEAR` of ε, and if both have the same number of channels, take both: the layers before
and after collapse.  The logits are measured but never selected.

Where nothing has collapsed, every layer lies before collapse, and NC4 says little about how well a density works there:
the candidate is the trunk (:mod:`psc_core.network.layers`), where the network has one.  Normalisation, activation and
pooling make the penultimate layer of it, and discard some of what tells unseen classes from known ones.

For a regression R² takes the place of NC4 (:mod:`psc_core.collapse.ridge`), and labels are bins of the target.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from psc_core.errors import UsageError, hint
from psc_core.network.layers import LayerInfo
from psc_core.tables import aligned

NEAR: Final = 0.05
"""Largest distance of NC1 from ε at which two layers are combined."""

CONSTANT: Final = 0.0
"""NC1 of a layer whose values differ between images by rounding alone, which is never chosen."""

EARLY: Final = 4
"""A candidate among the first 1/EARLY of the layers gets a note."""

_JSON_NAMES: Final = {
    "train_examples": "train_rows",
    "val_examples": "val_rows",
    "form": "kind",
    "quality": "nc4",
    "quality_error": "nc4_error",
}
"""Fields that have other names in the bundle format."""


@dataclass(frozen=True)
class Measure:
    """The names of a layer's quality besides NC1."""

    name: str  # in texts and JSON
    column: str  # in a table of all layers
    legend: str  # in a figure
    of_means: bool  # whether it is the accuracy of the nearest class mean, as that of the projection's sizes

    def __str__(self) -> str:
        return self.name


NC4: Final = Measure("NC4", "nc4", "NC4 (nearest class mean right)", of_means=True)
R2: Final = Measure("R²", "r2", "R² (of a linear fit)", of_means=False)
MEASURES: Final = {measure.name: measure for measure in (NC4, R2)}


@dataclass(frozen=True)
class LayerCollapse(LayerInfo):
    """A layer and the neural collapse measured after it."""

    nc1: float  # Tr(Σ_W)/Tr(Σ_T) on the training data: 1 without class structure, 0 for complete collapse
    quality: float  # NC4, the fraction of selection examples whose nearest class mean is that of their label; or R²
    quality_error: float | None = None  # standard error of the difference to the quality of the report's best layer


def eligible_layers(layers: Sequence[LayerCollapse], pattern: str | None) -> list[LayerCollapse]:
    """Return the layers before the output whose name matches the pattern."""
    matcher = re.compile(pattern or "")
    return [layer for layer in layers if layer.role != "output" and matcher.search(layer.name)]


def best_layer(layers: Sequence[LayerCollapse], epsilon: float, pattern: str | None) -> LayerCollapse | None:
    """Return the eligible layer of highest quality with NC1 > ε, on a tie the deepest; None if all have collapsed."""
    passing = [layer for layer in eligible_layers(layers, pattern) if layer.nc1 > epsilon]
    return max(passing, key=lambda layer: (layer.quality, layer.index), default=None)


@dataclass(frozen=True)
class Candidate:
    """The one or two layers that a PSC reads, in execution order, and why, in one sentence with the numbers."""

    layers: tuple[str, ...]
    reason: str
    notes: tuple[str, ...] = ()  # reasons against it
    report: CollapseReport | None = field(default=None, repr=False)  # the report that it was chosen from


@dataclass(frozen=True)
class CollapseReport:
    """Neural collapse of every measured layer."""

    layers: tuple[LayerCollapse, ...]  # in execution order
    epsilon: float  # neural collapse cutoff ε on NC1
    granularity: str  # which modules were measured, see :mod:`psc_core.network.layers`
    pattern: str | None  # regular expression that the candidate's name must match; None for any
    train_examples: int  # labelled examples that NC1 was measured on
    val_examples: int  # labelled examples that the quality was measured on
    seed: int | None = None  # of the split of the validation images; None where all of them were measured
    measure: Measure = NC4  # what the layers' quality is

    @property
    def penultimate(self) -> str:
        """The layer that the logits are computed from, which DDU uses."""
        return next(layer.name for layer in self.layers if layer.role == "penultimate")

    def layer(self, name: str) -> LayerCollapse:
        """Return the measurement of one layer.

        Raises:
            UsageError: If the layer was not measured.
        """
        for layer in self.layers:
            if layer.name == name:
                return layer
        names = [layer.name for layer in self.layers]
        near = hint(name, names, f"the last are {', '.join(names[-4:])}")
        raise UsageError(f"expected one of the measured layers, got {name!r}; {near}")

    def named(self, layer: LayerCollapse) -> str:
        """Return a layer's name with its numbers, as text."""
        return f"{layer.name} (NC1 {layer.nc1:.4f}, {self.measure} {layer.quality:.4f})"

    @property
    def eligible(self) -> list[LayerCollapse]:
        """The layers before the output whose name matches the pattern."""
        return eligible_layers(self.layers, self.pattern)

    @property
    def best(self) -> LayerCollapse | None:
        """The layer that :func:`best_layer` chooses."""
        return best_layer(self.layers, self.epsilon, self.pattern)

    def candidate(self, layer: str | None = None) -> Candidate:
        """Return the candidate by this module's rule among the layers of the pattern, or the one that the caller names.

        Raises:
            UsageError: If ``layer`` was not measured, or no layer matches the pattern.
        """
        if layer is not None:
            return self._noted([self.layer(layer)], f"{self.named(self.layer(layer))}, named by the caller")
        eligible, best = self.eligible, self.best
        if not eligible:
            raise UsageError(f"no layer before the output matches {self.pattern!r}; widen the pattern")
        if best is None:
            highest = max(eligible, key=lambda entry: (entry.nc1, entry.quality, entry.index))
            return self._noted(
                [highest],
                f"no layer has NC1 > {self.epsilon:g}, all have collapsed; the least collapsed one is "
                f"{self.named(highest)}: expect OOD detection no better than at the penultimate layer",
            )
        passing = [entry for entry in eligible if entry.nc1 > self.epsilon]
        trunk = next((entry for entry in eligible if entry.role == "trunk"), None)
        if self._nothing_collapsed and trunk is not None and self.measure.of_means:
            return self._noted(
                [trunk],
                f"{self.named(trunk)}, is all that the penultimate layer is computed from, before the network's last "
                f"normalisation and activation; nothing has collapsed, NC1 > {self.epsilon:g} after every layer",
            )
        chosen = [entry for entry in passing if best.quality - entry.quality <= (entry.quality_error or 0.0)][-1]
        reason = (
            f"{self.named(chosen)}, has the highest {self.measure} of the {len(passing)} layers with NC1 > "
            f"{self.epsilon:g}"
        )
        if chosen is not best:
            reason = (
                f"{self.named(chosen)}, is the deepest of the {len(passing)} layers with NC1 > {self.epsilon:g} whose "
                f"{self.measure} is within one standard error ({chosen.quality_error:.4f}) of the highest, "
                f"{best.quality:.4f} after {best.name}"
            )
        following = next((entry for entry in eligible if entry.index > chosen.index), None)
        if (
            following is None
            or following.nc1 == CONSTANT
            or following.nc1 > self.epsilon
            or following.shape[0] != chosen.shape[0]
            or all(abs(entry.nc1 - self.epsilon) > NEAR + 1e-12 for entry in (chosen, following))
        ):
            return self._noted([chosen], reason)
        return self._noted(
            [chosen, following],
            f"{reason}; the next layer, {self.named(following)}, joins it: it has collapsed, NC1 is within {NEAR:g} of "
            f"{self.epsilon:g} and both have {chosen.shape[0]} channels",
        )

    @property
    def _nothing_collapsed(self) -> bool:
        return all(layer.nc1 > self.epsilon for layer in self.layers if layer.role != "output")

    def _noted(self, chosen: Sequence[LayerCollapse], reason: str) -> Candidate:
        """Return the candidate ``chosen`` with the notes that a user should see."""
        before = [layer for layer in self.layers if layer.role != "output"]
        notes = []
        if EARLY * (1 + max(map(before.index, chosen), default=0)) <= len(before):
            notes.append(
                f"the candidate is among the first {len(before) // EARLY} of {len(before)} layers, whose features tell "
                f"textures apart, not classes: compare with a deeper one, as --layer {self.penultimate}"
            )
        return Candidate(tuple(layer.name for layer in chosen), reason, tuple(notes), self)

    def nc4_of(self, candidate: Candidate) -> float | None:
        """Return NC4 of the candidate's layer, the higher of two; None where another quality was measured."""
        return max(self.layer(name).quality for name in candidate.layers) if self.measure.of_means else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        layers = tuple(_in_json(asdict(layer)) for layer in self.layers)
        return _in_json({**asdict(self), "layers": layers, "measure": self.measure.name})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollapseReport:
        """Return the report whose fields :meth:`to_json` returned."""
        layers = tuple(
            LayerCollapse(**{**_of_json(entry), "shape": tuple(entry["shape"]), "grid": tuple(entry["grid"])})
            for entry in data["layers"]
        )
        stored = {**_of_json(data), "measure": MEASURES[data.get("measure", NC4.name)]}
        return cls(layers, *(stored[part.name] for part in fields(cls)[1:]))


def _in_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields under their names in a bundle."""
    return {_JSON_NAMES.get(name, name): value for name, value in values.items()}


def _of_json(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return fields of a bundle under their names here."""
    names = {known: name for name, known in _JSON_NAMES.items()}
    return {names.get(name, name): value for name, value in values.items()}


def to_text(report: CollapseReport, candidate: Candidate) -> str:
    """Return a table of all layers, with the candidate marked and its reason below."""
    rows = [["#", "layer", "form", "channels×spatial", "NC1", report.measure.name]]
    for entry in report.layers:
        marks = ["◀ candidate"] if entry.name in candidate.layers else []
        marks += [entry.role] if entry.role != "hidden" else []
        numbers = [f"{entry.shape[0]}×{entry.shape[1]}", f"{entry.nc1:.4f}", f"{entry.quality:.4f}"]
        rows.append([str(entry.index), entry.name, entry.form, *numbers, "  ".join(marks)])
    lines = aligned(rows, left={1, 2, 6})
    lines.append(f"candidate: {candidate.reason}")
    lines += [f"note: {note}" for note in candidate.notes]
    if report.penultimate not in candidate.layers:
        lines.append(f"penultimate: {report.named(report.layer(report.penultimate))}, for comparison (DDU)")
    return "\n".join(lines)


def to_csv(report: CollapseReport) -> str:
    """Return a header and one line for each layer, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", "layer", "kind", "channels", "spatial", "role", "nc1", report.measure.column])
    for entry in report.layers:
        writer.writerow([entry.index, entry.name, entry.form, *entry.shape, entry.role, entry.nc1, entry.quality])
    return text.getvalue()
