"""Measure neural collapse after every layer, and select the candidate layer(s) by it.

Group layers that are read together, and split wide ones into ranges of columns that fit the memory budget.

A layer of shape (C, d) has C · d columns; its class means take classes × columns × 8 bytes, and the features of a batch
images × columns × 4 bytes.

Report neural collapse of every layer, select the candidate layer(s) from it, and print it as tables.

Paper, section 4.1: of the layers whose features still vary within classes, NC1 > ε, take the one with the highest NC4,
where the nearest class mean is right most often.  The selection split decides this up to an error, so of those whose
NC4 is within one paired standard error of the highest, take the deepest.  If the next layer has collapsed, NC1 ≤ ε, if
NC1 of either is within :data:`NEAR` of ε, and if both have the same number of channels, take both: the layers before
and after collapse.  The logits are measured but never selected.

Where nothing has collapsed, every layer lies before collapse, and NC4 says little about how well a density works there:
the candidate is the trunk (:mod:`psc_core.network.layers`), where the network has one.  Normalisation, activation and
pooling make the penultimate layer of it, and discard some of what tells unseen classes from known ones.

For a regression R² takes the place of NC4 (:mod:`psc_core.collapse.ridge`), and labels are bins of the target.

Measure NC4 of every layer: the fraction of selection examples whose nearest class mean is that of their label.

:mod:`.measure` has the mathematics.

Fit a ridge regression to each layer; its R² is for a regression what NC4 is for classes.

For each layer, with h the features of an image, flattened, and y its number,

    x = S h                                S: a count sketch (Charikar, Chen & Farach-Colton 2002) where h is wide
    w_λ = (Σ_xx + λ I)^{-1} Σ_xy           from sums over the training images
    λ = argmin GCV(λ) = n RSS(λ) / (n − 1 − df(λ))²,   df(λ) = Σ_j e_j / (e_j + λ)    (Golub, Heath & Wahba 1979)
    R² = 1 − Σ_i (y_i − ŷ_i)² / Σ_i (y_i − ȳ)²        over the selection images (:mod:`psc_core.numerics.explained`)
    its error = √(Σ_i d_i²) / Σ_i (y_i − ȳ)²          standard error of its difference to the best layer's R²

with e_j the eigenvalues of Σ_xx and d_i the difference of the two layers' squared errors of image i.  A count sketch
adds each feature, with a random sign, to one of :data:`SKETCH` columns; it keeps inner products on average, so a linear
function of h is about one of x.  All sums are float64.  The analogy is ours, not the paper's.

Measure R² of every layer: how well linear functions of it predict a regression's target.

Each group of layers takes two passes, over the training images and over the selection images;
:mod:`psc_core.collapse.ridge` has the mathematics.

Measure neural collapse after every layer: NC1 on training data, NC4 on the selection split.

For each layer, with the sums of :mod:`psc_core.numerics.scatter`,

    NC1 = Tr(Σ_W) / Tr(Σ_T)      within-class fraction of the variability, over the labelled training examples
    NC4 = fraction of the labelled selection examples whose nearest class mean (Euclidean) is that of their label
    NC4's error = √(Σ_i d_i²) / examples      standard error of its difference to the best layer's NC4

with d_i the difference in how many labels of selection image i the two layers hit: where each image has one label,
McNemar's √(b + c) / n of the b + c images that one layer gets right and the other wrong.  (Paper, section 4.1 and
appendix A.1: after each layer.)  This takes one pass over the training images, class by class, and one
over the selection images (:mod:`.nearest_mean`).  For a regression the classes are bins of the target, and R² takes
the place of NC4 (:mod:`.linear`), with one more pass over the training images.

Class means take classes × width × 8 bytes per layer.  Layers are measured in groups that fit the memory budget, two
passes per group; a layer that does not fit alone is measured in column ranges (:mod:`.columns`), over which scatter and
distances add up.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from psc_core.compute import Compute, add_statistics, distances_to_means, passes
from psc_core.data.dataset import ImageDataset, known_values
from psc_core.errors import FitError, UsageError, hint
from psc_core.network.backbone import Backbone, feature_step, trial_input, truncate
from psc_core.network.layers import LayerInfo, list_layers, select_layers
from psc_core.numerics.linalg import eigh, r_squared, r_squared_error
from psc_core.numerics.scatter import MIN_COLUMNS, ClassScatter, ScatterSums
from psc_core.settings import FitSettings
from psc_core.tables import aligned


@dataclass(frozen=True)
class ColumnRange:
    """The columns from ``start`` to ``stop``, exclusive, of a layer's flattened features."""

    layer: LayerInfo
    start: int
    stop: int

    @property
    def is_last(self) -> bool:
        """Whether the range ends with the layer."""
        return self.stop == math.prod(self.layer.shape)

    @property
    def is_whole(self) -> bool:
        """Whether the range is all of the layer."""
        return self.start == 0 and self.is_last


@dataclass(frozen=True)
class LayerGroup:
    """Layers that the network is cut behind at once.

    Attributes:
        rounds: The ranges that are read in the same pass over the images: several layers, each whole, in one round, or
            the parts of one layer in several rounds.
    """

    rounds: tuple[tuple[ColumnRange, ...], ...]

    @property
    def layers(self) -> list[LayerInfo]:
        """The layers, in order."""
        return [columns.layer for columns in self.rounds[0]]


def layer_groups(layers: Sequence[LayerInfo], classes: int, batch_images: int, budget: int) -> list[LayerGroup]:
    """Return the layers, in order, in groups whose class means and batch features fit ``budget``, bytes."""
    groups: list[LayerGroup] = []
    together: list[ColumnRange] = []
    free = budget
    for layer in layers:
        width = math.prod(layer.shape)
        features, means = 4 * batch_images * width, 8 * classes * width
        if together and features + means > free:
            groups.append(LayerGroup((tuple(together),)))
            together, free = [], budget
        if features + means <= budget:
            together.append(ColumnRange(layer, 0, width))
            free -= features + means
        else:
            step = min(width, max(MIN_COLUMNS, (budget - features) // (8 * classes)))
            parts = (ColumnRange(layer, start, min(width, start + step)) for start in range(0, width, step))
            groups.append(LayerGroup(tuple((part,) for part in parts)))
    return [*groups, *([LayerGroup((tuple(together),))] if together else [])]


def columns_of(features: Sequence[Tensor], ranges: Sequence[ColumnRange]) -> list[Tensor]:
    """Return the columns (batch, columns) of each range of a round, from the features of the group's layers."""
    return [layer.flatten(1)[:, part.start : part.stop] for layer, part in zip(features, ranges, strict=True)]


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


Round = tuple[Sequence[ColumnRange], Sequence[Tensor]]
"""Ranges of columns, and the class means (classes, columns) of each over the training images."""


class LayerQuality:
    """The quality of every layer on the selection split; higher is better.

    Args:
        train: All training images.
        selection: The images that the quality is measured on, none of them trained on.
        compute: Device, batch size, memory and processes.
    """

    measure: ClassVar[Measure]

    def __init__(self, train: ImageDataset, selection: ImageDataset, compute: Compute) -> None:
        self.train = train
        self.selection = selection
        self.compute = compute

    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Measure the layers of a group.

        Args:
            backbone: The network, cut behind these layers.
            group: The layers.
            rounds: The group's rounds with their class means, which may be overwritten.  Taking a round makes a pass
                over the training images that measures NC1, so every round has to be taken.
            label: The beginning of the progress bars' text.
        """
        raise NotImplementedError

    def value(self, layer: str) -> float:
        """Return the quality after ``layer``."""
        raise NotImplementedError

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between the qualities after ``layer`` and after ``best``."""
        raise NotImplementedError


class NearestMean(LayerQuality):
    """The accuracy of the nearest class mean; it keeps one bit for each labelled example and layer."""

    measure = NC4

    def __init__(self, train: ImageDataset, selection: ImageDataset, compute: Compute) -> None:
        super().__init__(train, selection, compute)
        self._hits: dict[str, npt.NDArray[np.uint8]] = {}  # bits, one an example

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Read the selection images once for each round, and note which examples each layer gets right."""
        reducer, device = self.compute.reducer, self.compute.device
        shard, shard_examples = reducer.shard(self.selection), reducer.shard_examples(self.selection).to(device)
        kept: Tensor | None = None  # distances of the ranges so far, of a layer in several
        for ranges, means in rounds:
            if kept is None and not ranges[0].is_whole:
                kept = torch.zeros(len(shard), len(self.selection.classes), dtype=torch.float64)
            hits = torch.zeros(len(ranges), self.selection.examples, dtype=torch.uint8, device=device)
            images = examples = 0
            take = partial(columns_of, ranges=ranges)
            step, description = feature_step(backbone), f"{label}: nearest mean"
            for batch, _, found in distances_to_means(means, shard, self.compute, description, step, take):
                where = slice(images, images := images + len(batch.images))
                image_index, labels = batch.image_index.to(device), batch.labels.to(device)
                at = shard_examples[examples : (examples := examples + len(labels))]
                for row, (part, distances) in enumerate(zip(ranges, found, strict=True)):
                    total = distances if kept is None else kept[where].add_(distances.cpu())
                    if part.is_last:
                        hits[row, at] = (total.argmin(1).to(device)[image_index] == labels).to(hits.dtype)
            for part, of_layer in zip(ranges, reducer.sum_(hits).cpu().numpy(), strict=True):
                if part.is_last:
                    self._hits[part.layer.name] = np.packbits(of_layer)

    def hits(self, layer: str) -> Bool[Tensor, " examples"]:
        """Return whether each labelled selection example's nearest class mean after ``layer`` is that of its label."""
        return torch.from_numpy(np.unpackbits(self._hits[layer], count=self.selection.examples)).bool()

    def value(self, layer: str) -> float:
        """Return NC4 after ``layer``."""
        return int(self.hits(layer).sum()) / self.selection.examples

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between NC4 after ``layer`` and after ``best``."""
        return paired_error(self.hits(layer), self.hits(best), self.selection.offsets)


def paired_error(
    one: Bool[Tensor, " examples"], other: Bool[Tensor, " examples"], offsets: Int[Tensor, " starts"]
) -> float:
    """Return the standard error of the difference between the fractions of examples that two layers get right.

    Labels of one image are hit or missed together, so its examples, from one of ``offsets`` to the next, count as one.
    """
    image_index = torch.arange(len(offsets) - 1).repeat_interleave(offsets.diff())
    differences = torch.zeros(len(offsets) - 1).double().index_add_(0, image_index, one.double() - other.double())
    return float(differences.norm()) / len(one)


SKETCH: Final = 512
"""Columns of a count sketch."""

PENALTIES: Final = torch.logspace(-8, 2, 21, dtype=torch.float64)
"""Values of λ to choose from, relative to the mean variance of a column."""


class CountSketch:
    """A count sketch of features of one width; narrow features stay as they are.

    Args:
        width: Number of columns of the flattened features.
        device: The device of the features.
    """

    def __init__(self, width: int, device: torch.device | str = "cpu") -> None:
        self.columns = min(width, SKETCH)
        generator = torch.Generator().manual_seed(width)
        self.target = torch.randint(0, SKETCH, (width,), generator=generator).to(device)
        self.sign = (1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator)).to(device)

    def __call__(self, features: Float[Tensor, "batch width"]) -> Float[Tensor, "batch columns"]:
        """Return x, float64."""
        if features.shape[1] == self.columns:
            return features.double()
        sketch = torch.zeros(len(features), self.columns, device=features.device)
        return sketch.index_add_(1, self.target, features.float() * self.sign).double()


class RidgeSums:
    """Sums over the training images seen so far: n, Σ x, Σ y, Σ x xᵀ, Σ x y, Σ y², float64, in one matrix."""

    def __init__(self, columns: int, device: torch.device | str = "cpu") -> None:
        self.sums = torch.zeros(columns + 2, columns + 2, dtype=torch.float64, device=device)

    def add(self, x: Float[Tensor, "batch columns"], y: Float[Tensor, " batch"]) -> None:
        """Add a batch."""
        whole = torch.cat([torch.ones_like(y)[:, None], x, y[:, None]], dim=1)
        self.sums.addmm_(whole.T, whole)

    def all_reduce(self, sum_: Callable[[Tensor], Tensor]) -> None:
        """Add up the sums of all processes by ``sum_``."""
        self.sums = sum_(self.sums)


class Ridge(NamedTuple):
    """A fitted regression, ŷ = intercept + xᵀ weight."""

    weight: Float[Tensor, " columns"]
    intercept: Float[Tensor, ""]

    def __call__(self, x: Float[Tensor, "batch columns"]) -> Float[Tensor, " batch"]:
        return x @ self.weight + self.intercept


def fit_ridge(sums: RidgeSums) -> Ridge:
    """Return the ridge regression with the penalty of the smallest GCV; for constant features it predicts the mean."""
    total = sums.sums
    n, mean = total[0, 0], total[0, 1:] / total[0, 0]
    centred = total[1:, 1:] - n * torch.outer(mean, mean)
    xx, xy, yy = centred[:-1, :-1], centred[:-1, -1], centred[-1, -1]
    values, vectors = eigh(xx)
    rotated = vectors.T @ xy
    scale = values.mean()
    if scale <= 0:
        return Ridge(torch.zeros_like(xy), mean[-1])
    penalties = (PENALTIES.to(xx.device) * scale)[:, None]
    weights = rotated / (values + penalties)
    residual = yy - 2 * weights @ rotated + weights.square() @ values
    freedom = (n - 1 - (values / (values + penalties)).sum(1)).clamp(min=1e-3)
    best = weights[(residual.clamp(min=0) / freedom.square()).argmin()]
    weight = vectors @ best
    return Ridge(weight, mean[-1] - mean[:-1] @ weight)


class LinearFit(LayerQuality):
    """R² of ridge regressions; it keeps the squared error of every selection image for each layer."""

    measure = R2

    def __init__(self, train: ImageDataset, selection: ImageDataset, compute: Compute) -> None:
        super().__init__(train, selection, compute)
        self._errors: dict[str, Float[Tensor, " n"]] = {}

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Fit a ridge regression to every layer of the group, and predict the selection images by it."""
        for _ in rounds:  # Linear fits need no class means.
            pass
        compute, reducer = self.compute, self.compute.reducer
        shard = torch.arange(reducer.rank, len(self.selection), reducer.world)
        step = feature_step(backbone)
        sketches = [CountSketch(math.prod(layer.shape), compute.device) for layer in group.layers]
        sums = [RidgeSums(sketch.columns, compute.device) for sketch in sketches]
        for features, batch in passes(reducer.shard(self.train), compute, f"{label}: linear fits", step):
            y = known_values(batch.values).to(compute.device)
            for sketch, layer, of_layer in zip(sketches, features, sums, strict=True):
                of_layer.add(sketch(layer.flatten(1)), y)
        ridges = []
        for of_layer in sums:
            of_layer.all_reduce(reducer.sum_)
            ridges.append(fit_ridge(of_layer))
        errors = torch.zeros(len(ridges), len(self.selection), dtype=torch.float64)
        seen = 0
        for features, batch in passes(reducer.shard(self.selection), compute, f"{label}: linear predictions", step):
            at, y = shard[seen : seen + len(batch.images)], known_values(batch.values).to(compute.device)
            seen += len(batch.images)
            for row, (sketch, ridge, layer) in enumerate(zip(sketches, ridges, features, strict=True)):
                errors[row, at] = (ridge(sketch(layer.flatten(1))) - y).square().cpu()
        self._errors |= {layer.name: row for layer, row in zip(group.layers, reducer.sum_(errors), strict=True)}

    def value(self, layer: str) -> float:
        """Return R² after ``layer``."""
        return r_squared(self._errors[layer], known_values(self.selection.values))

    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between R² after ``layer`` and after ``best``."""
        return r_squared_error(self._errors[layer], self._errors[best], known_values(self.selection.values))


def measure_layers(
    net: nn.Module,
    train: ImageDataset,
    selection: ImageDataset,
    settings: FitSettings,
    compute: Compute,
    quality_type: type[LayerQuality],
) -> CollapseReport:
    """Measure NC1 and another quality after the layers of ``net``.

    Args:
        net: The trained network, which is moved to the device and put in evaluation mode.
        train: The images that NC1 is measured on, with some of every class; each process reads its own shard.
        selection: The images that the quality is measured on, of the same classes; each process reads its own shard.
        settings: ε, the pattern of the layers' names (the penultimate layer is measured in any case), and the seed by
            which ``selection`` was split off.
        compute: A device that supports float64.  The network runs in float32 whatever the precision, so that the choice
            of the layer does not depend on it.
        quality_type: The quality besides NC1, from :mod:`.nearest_mean` or :mod:`.linear`.

    Raises:
        FitError: If features are not finite.
        UsageError: If a pattern matches no layer.
        NetworkError: If the network cannot be run or cut.
    """
    epsilon, pattern = settings.epsilon, settings.layers
    compute = replace(compute, precision="fp32")
    trial = trial_input(train.preprocess).to(compute.device)
    every = list_layers(net.to(compute.device), trial, granularity=settings.granularity)
    names = {layer.name for layer in select_layers(every, pattern)}
    wanted = [layer for layer in every if layer.name in names or layer.role == "penultimate"]
    sums = {layer.name: ScatterSums() for layer in wanted}
    quality = quality_type(train, selection, compute)
    groups = layer_groups(wanted, len(train.classes), compute.batch_size, compute.max_memory)
    for number, group in enumerate(groups, 1):
        backbone = truncate(net, [layer.name for layer in group.layers], keep_output=False, trial=trial)
        label = f"collapse {number}/{len(groups)}"
        quality.read(backbone, group, _rounds(backbone, group, train, compute, sums, label), label)
    measured = [
        LayerCollapse(
            **vars(layer),
            # Constant features have collapsed, whatever the rounding of their values knows of the classes.
            nc1=CONSTANT if sums[layer.name].is_rounding else sums[layer.name].nc1,
            quality=quality.value(layer.name),
        )
        for layer in wanted
    ]
    best = best_layer(measured, epsilon, pattern)
    if best is not None:
        measured = [replace(layer, quality_error=quality.error(layer.name, best.name)) for layer in measured]
    counted = train.examples, selection.examples
    return CollapseReport(
        tuple(measured), epsilon, settings.granularity, pattern, *counted, settings.seed, quality.measure
    )


def _rounds(
    backbone: Backbone,
    group: LayerGroup,
    train: ImageDataset,
    compute: Compute,
    sums: Mapping[str, ScatterSums],
    label: str,
) -> Iterator[Round]:
    """Yield the rounds of a group with their class means, each after a pass over the training images into ``sums``."""
    shard, step = compute.reducer.shard(train), feature_step(backbone)
    for ranges in group.rounds:
        statistics = [ClassScatter(len(train.classes), part.stop - part.start, compute.device) for part in ranges]
        take = partial(columns_of, ranges=ranges)
        add_statistics(statistics, shard, compute, f"{label}: class statistics", step, take)
        for part, scatter in zip(ranges, statistics, strict=True):
            of_layer = sums[part.layer.name]
            of_layer.add(scatter)
            if not math.isfinite(of_layer.within + of_layer.between):
                raise FitError(
                    f"expected finite features, layer {part.layer.name} gives NaN or infinity on {train.name}; "
                    "check the weights and the preprocessing"
                )
        yield ranges, [scatter.means for scatter in statistics]
