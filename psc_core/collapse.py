"""Measure neural collapse after every layer, and select the chosen layer(s) by it.

For each layer, with the sums of :mod:`psc_core.linalg`,

    NC1 = Tr(Σ_W) / Tr(Σ_T)      within-class fraction of the variability, over the labelled training examples
    NC4 = fraction of the labelled selection examples whose nearest class mean (Euclidean) is that of their label
    NC4's error = √(Σ_i d_i²) / examples      standard error of its difference to the best layer's NC4

with d_i the difference in how many labels of selection image i the two layers hit: where each image has one label,
McNemar's √(b + c) / n of the b + c images that one layer gets right and the other wrong.  (Paper, section 4.1 and
appendix A.1: after each layer.)  This takes one pass over the training images, class by class, and one over the
selection images.  Class means take classes × width × 8 bytes per layer, the features of a batch images × width × 4.
Layers are measured in groups that fit the memory budget, two passes per group; a layer that does not fit alone is
measured in ranges of columns, over which scatter and distances add up.

Paper, section 4.1: of the layers whose features still vary within classes, NC1 > ε, take the one with the highest NC4,
where the nearest class mean is right most often.  The selection split decides this up to an error, so of those whose
NC4 is within one paired standard error of the highest, take the deepest.  If the next layer has collapsed, NC1 ≤ ε, if
NC1 of either is within :data:`NEAR` of ε, and if both have the same number of channels, take both: the layers before
and after collapse.  The logits are measured but never selected.

Where nothing has collapsed, every layer lies before collapse, and NC4 says little about how well a density works there:
the trunk (:mod:`psc_core.network.layers`) is chosen, where the network has one.  Normalisation, activation and pooling
make the penultimate layer of it, and discard some of what tells unseen classes from known ones.

For a regression labels are bins of the target, and R² of a ridge regression takes the place of NC4, with one more pass
over the training images.  With h the features of an image, flattened, and y its number,

    x = S h                                S: a count sketch (Charikar, Chen & Farach-Colton 2002) where h is wide
    w_λ = (Σ_xx + λ I)^{-1} Σ_xy           from sums over the training images
    λ = argmin GCV(λ) = n RSS(λ) / (n − 1 − df(λ))²,   df(λ) = Σ_j e_j / (e_j + λ)    (Golub, Heath & Wahba 1979)
        over λ with n − 1 − df(λ) > 1; if there is none, the largest
    R² = 1 − Σ_i (y_i − ŷ_i)² / Σ_i (y_i − ȳ)²        over the selection images
    its error = √(Σ_i d_i²) / Σ_i (y_i − ȳ)²          standard error of its difference to the best layer's R²

with e_j the eigenvalues of Σ_xx and d_i the difference of the two layers' squared errors of image i.  A count sketch
adds each feature, with a random sign, to one of :data:`SKETCH` columns; it keeps inner products on average, so a linear
function of h is about one of x.  All sums are float64.  The analogy is ours, not the paper's.
"""

from __future__ import annotations

import csv
import io
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from typing import Any, ClassVar, Final

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from psc_core.compute import Compute, add_statistics, distances_to_means, passes
from psc_core.data.dataset import ImageDataset, known_values
from psc_core.errors import FitError, UsageError, hint
from psc_core.features import KeptFeatures
from psc_core.images.preprocess import Inputs
from psc_core.linalg import (
    MIN_COLUMNS,
    ClassScatter,
    eigh,
    is_rounding,
    nc1_of,
    r_squared,
    r_squared_error,
    scatter_sums,
)
from psc_core.network.cut import Backbone, feature_step, trial_input, truncate
from psc_core.network.layers import LayerInfo, list_layers, select_layers
from psc_core.settings import FitSettings
from psc_core.text import align

NEAR: Final = 0.05  # largest distance of NC1 from ε at which two layers are combined
CONSTANT: Final = 0.0  # NC1 of a layer whose values differ between images by rounding alone, which is never chosen
EARLY: Final = 4  # a chosen layer among the first 1/EARLY of the layers gets a note


@dataclass(frozen=True)
class LayerCollapse(LayerInfo):
    """A layer and the neural collapse measured after it."""

    nc1: float  # Tr(Σ_W)/Tr(Σ_T) on the training data: 1 without class structure, 0 for complete collapse
    quality: float  # NC4, the fraction of selection examples whose nearest class mean is that of their label; or R²
    quality_error: float | None = None  # standard error of the difference to the quality of the report's best layer


LayerGroup = tuple[list[LayerInfo], list[slice]]  # layers cut behind at once, and the columns that each pass reads
Round = tuple[slice, list[Tensor]]  # such columns, and each layer's class means (classes, columns) over training images


class LayerQuality(ABC):
    """The quality of every layer on the selection split, none of it trained on; higher is better."""

    name: ClassVar[str]  # in texts and JSON
    column: ClassVar[str]  # in a table of all layers
    legend: ClassVar[str]  # in a figure
    of_means: ClassVar[bool]  # whether it is the accuracy of the nearest class mean, as that of the projection's sizes

    def __init__(self, train: ImageDataset, selection: ImageDataset, compute: Compute) -> None:
        self.train = train
        self.selection = selection
        self.compute = compute
        self._kept: dict[str, Tensor] = {}  # what is kept of each layer until the qualities are asked for

    @abstractmethod
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        """Measure the layers of a group, behind which the network is cut.

        Taking a round makes a pass over the training images that measures NC1, so every round has to be taken; its
        means may be overwritten.
        """

    @abstractmethod
    def value(self, layer: str) -> float: ...

    @abstractmethod
    def error(self, layer: str, best: str) -> float:
        """Return the standard error of the difference between the qualities after ``layer`` and after ``best``."""


class NearestMean(LayerQuality):
    """The accuracy of the nearest class mean; it keeps one bit for each labelled example and layer."""

    name, column, legend, of_means = "NC4", "nc4", "NC4 (nearest class mean right)", True

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        (layers, ranges), compute, device = group, self.compute, self.compute.device
        shard, shard_examples = compute.shard(self.selection), compute.shard_examples(self.selection).to(device)
        kept: Tensor | None = None  # distances of the ranges so far, of a layer in several
        if len(ranges) > 1:
            kept = torch.zeros(len(shard), len(self.selection.classes), dtype=torch.float64)
        hits = torch.zeros(len(layers), self.selection.examples, dtype=torch.uint8, device=device)
        size = torch.zeros(len(layers), dtype=torch.float64, device=device)  # NaN or infinite where some distance is
        step, description = feature_step(backbone, "fp32"), f"{label}: nearest mean"
        for number, (columns, means) in enumerate(rounds, 1):
            images = examples = 0
            take = partial(columns_of, columns=columns)
            for batch, _, found in distances_to_means(means, shard, compute, description, step, take):
                where = slice(images, images := images + len(batch.images))
                image_index, labels = batch.image_index.to(device), batch.labels.to(device)
                at = shard_examples[examples : (examples := examples + len(labels))]
                for row, distances in enumerate(found):
                    total = distances if kept is None else kept[where].add_(distances.cpu())
                    size[row] += total.abs().sum().to(device)
                    if number == len(ranges):
                        hits[row, at] = (total.argmin(1).to(device)[image_index] == labels).to(hits.dtype)
        check_finite(layers, compute.sum_(size), self.selection)
        for layer, of_layer in zip(layers, compute.sum_(hits).cpu().numpy(), strict=True):
            self._kept[layer.name] = torch.from_numpy(np.packbits(of_layer))

    def hits(self, layer: str) -> Bool[Tensor, " examples"]:
        """Return whether each labelled selection example's nearest class mean after ``layer`` is that of its label."""
        return torch.from_numpy(np.unpackbits(self._kept[layer].numpy(), count=self.selection.examples)).bool()

    def value(self, layer: str) -> float:
        return int(self.hits(layer).sum()) / self.selection.examples

    def error(self, layer: str, best: str) -> float:
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


SKETCH: Final = 512  # columns of a count sketch
# Values of λ to choose from, relative to the mean variance of a column.
PENALTIES: Final = torch.logspace(-8, 2, 21, dtype=torch.float64)


def count_sketch(width: int, device: torch.device | str = "cpu") -> Callable[[Tensor], Tensor]:
    """Return a function from features (batch, width) to x (batch, columns), float64; narrow ones stay as they are."""
    if width <= SKETCH:
        return lambda features: features.double()
    generator = torch.Generator().manual_seed(width)
    target = torch.randint(0, SKETCH, (width,), generator=generator).to(device)
    sign = (1.0 - 2.0 * torch.randint(0, 2, (width,), generator=generator)).to(device)

    def sketch(features: Tensor) -> Tensor:
        sums = torch.zeros(len(features), SKETCH, device=features.device)
        return sums.index_add_(1, target, features.float() * sign).double()

    return sketch


def add_products(
    sums: Float[Tensor, "width width"], x: Float[Tensor, "batch columns"], y: Float[Tensor, " batch"]
) -> None:
    """Add a batch to n, Σ x, Σ y, Σ x xᵀ, Σ x y and Σ y², float64, in one matrix of two columns more than x."""
    whole = torch.cat([torch.ones_like(y)[:, None], x, y[:, None]], dim=1)
    sums.addmm_(whole.T, whole)


def fit_ridge(total: Float[Tensor, "width width"]) -> Callable[[Tensor], Tensor]:
    """Return the predictions ŷ(x) of the ridge regression of the smallest GCV; of constant features it is the mean."""
    n, mean = total[0, 0], total[0, 1:] / total[0, 0]
    centred = total[1:, 1:] - n * torch.outer(mean, mean)
    xx, xy, yy = centred[:-1, :-1], centred[:-1, -1], centred[-1, -1]
    values, vectors = eigh(xx)
    rotated = vectors.T @ xy
    scale = values.mean()
    weight, intercept = torch.zeros_like(xy), mean[-1]
    if scale > 0:
        penalties = (PENALTIES.to(xx.device) * scale)[:, None]
        weights = rotated / (values + penalties)
        residual = yy - 2 * weights @ rotated + weights.square() @ values
        freedom = n - 1 - (values / (values + penalties)).sum(1)
        # With hardly a degree of freedom left, the ratio is one of rounding errors, and a fit may interpolate noise.
        score = torch.where(freedom > 1, residual.clamp(min=0) / freedom.square(), math.inf)
        weight = vectors @ weights[score.argmin() if bool(score.isfinite().any()) else -1]
        intercept = mean[-1] - mean[:-1] @ weight
    return lambda x: x @ weight + intercept


class LinearFit(LayerQuality):
    """R² of ridge regressions; it keeps the squared error of every selection image for each layer."""

    name, column, legend, of_means = "R²", "r2", "R² (of a linear fit)", False

    @torch.inference_mode()
    def read(self, backbone: Backbone, group: LayerGroup, rounds: Iterable[Round], label: str) -> None:
        for _ in rounds:  # Linear fits need no class means.
            pass
        layers, compute, step = group[0], self.compute, feature_step(backbone, "fp32")
        widths = [math.prod(layer.shape) for layer in layers]
        sketches = [count_sketch(width, compute.device) for width in widths]
        sizes = [min(width, SKETCH) + 2 for width in widths]
        sums = [torch.zeros(size, size, dtype=torch.float64, device=compute.device) for size in sizes]
        for features, batch in passes(compute.shard(self.train), compute, f"{label}: linear fits", step):
            y = known_values(batch.values).to(compute.device)
            for sketch, layer, of_layer in zip(sketches, features, sums, strict=True):
                add_products(of_layer, sketch(layer.flatten(1)), y)
        ridges = [fit_ridge(compute.sum_(of_layer)) for of_layer in sums]
        shard = torch.arange(compute.rank, len(self.selection), compute.world)
        errors = torch.zeros(len(ridges), len(self.selection), dtype=torch.float64)
        seen = 0
        for features, batch in passes(compute.shard(self.selection), compute, f"{label}: linear predictions", step):
            at, y = shard[seen : seen + len(batch.images)], known_values(batch.values).to(compute.device)
            seen += len(batch.images)
            for row, (sketch, ridge, layer) in enumerate(zip(sketches, ridges, features, strict=True)):
                errors[row, at] = (ridge(sketch(layer.flatten(1))) - y).square().cpu()
        errors = compute.sum_(errors)
        check_finite(layers, errors.sum(1), self.selection)
        self._kept |= {layer.name: row for layer, row in zip(layers, errors, strict=True)}

    def value(self, layer: str) -> float:
        return r_squared(self._kept[layer], known_values(self.selection.values))

    def error(self, layer: str, best: str) -> float:
        return r_squared_error(self._kept[layer], self._kept[best], known_values(self.selection.values))


def check_finite(layers: Sequence[LayerInfo], sums: Float[Tensor, " layers"], data: ImageDataset) -> None:
    """Require a finite sum of what was computed from each layer's features for the images."""
    for layer, total in zip(layers, sums, strict=True):
        if not total.isfinite():
            raise FitError(
                f"expected finite features, layer {layer.name} gives NaN or infinity on {data.name}; check the "
                "weights and the preprocessing"
            )


MEASURES: Final = {measure.name: measure for measure in (NearestMean, LinearFit)}


def check_layer(name: str, layers: Sequence[LayerInfo]) -> None:
    """Require one of the layers before the output."""
    names = [layer.name for layer in layers if layer.role != "output"]
    if name not in names:
        near = hint(name, names, f"the last are {', '.join(names[-4:])}")
        raise UsageError(f"expected one of the measured layers before the output, got {name!r}; {near}")


@dataclass(frozen=True)
class ChosenLayer:
    """The one or two layers that a PSC reads, in execution order, and why, in one sentence with the numbers."""

    layers: tuple[str, ...]
    reason: str
    notes: tuple[str, ...] = ()  # reasons against it
    report: CollapseReport | None = field(default=None, repr=False)  # the report that it was chosen from

    @property
    def collapsed_penultimate(self) -> str | None:
        """The penultimate layer if it is not chosen because it has collapsed: there classes lie furthest apart."""
        if self.report is None or not self.report.measure.of_means:
            return None
        layer = self.report.layer(self.report.penultimate)
        has_collapsed = CONSTANT < layer.nc1 <= self.report.epsilon
        return layer.name if has_collapsed and layer.name not in self.layers else None


@dataclass(frozen=True)
class CollapseReport:
    """Neural collapse of every measured layer."""

    layers: tuple[LayerCollapse, ...]  # in execution order
    epsilon: float  # neural collapse cutoff ε on NC1
    granularity: str  # which modules were measured, see :mod:`psc_core.network.layers`
    pattern: str | None  # regular expression that the chosen layer's name must match; None for any
    train_examples: int  # labelled examples that NC1 was measured on
    val_examples: int  # labelled examples that the quality was measured on
    seed: int | None = None  # of the split of the validation images; None where all of them were measured
    measure: type[LayerQuality] = NearestMean  # what the layers' quality is

    @property
    def penultimate(self) -> str:
        """The layer that the logits are computed from, which DDU uses."""
        return next(layer.name for layer in self.layers if layer.role == "penultimate")

    def layer(self, name: str) -> LayerCollapse:
        """Return the measurement of one layer."""
        check_layer(name, self.layers)
        return next(layer for layer in self.layers if layer.name == name)

    def named(self, layer: LayerCollapse) -> str:
        """Return a layer's name with its numbers, as text."""
        return f"{layer.name} (NC1 {layer.nc1:.4f}, {self.measure.name} {layer.quality:.4f})"

    @property
    def eligible(self) -> list[LayerCollapse]:
        """The layers before the output whose name matches the pattern."""
        matcher = re.compile(self.pattern or "")
        return [layer for layer in self.layers if layer.role != "output" and matcher.search(layer.name)]

    @property
    def best(self) -> LayerCollapse | None:
        """The eligible layer of highest quality with NC1 > ε, on a tie the deepest; None if all have collapsed."""
        passing = [layer for layer in self.eligible if layer.nc1 > self.epsilon]
        return max(passing, key=lambda layer: (layer.quality, layer.index), default=None)

    def choose(self, layer: str | None = None) -> ChosenLayer:
        """Return the layer that this module's rule chooses among those of the pattern, or the one the caller names."""
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
        trunk = next((entry for entry in eligible if entry.role == "trunk"), None)
        nothing_collapsed = all(layer.nc1 > self.epsilon for layer in self.layers if layer.role != "output")
        if nothing_collapsed and trunk is not None and self.measure.of_means:
            return self._noted(
                [trunk],
                f"{self.named(trunk)}, is all that the penultimate layer is computed from, before the network's last "
                f"normalisation and activation; nothing has collapsed, NC1 > {self.epsilon:g} after every layer",
            )
        passing = [entry for entry in eligible if entry.nc1 > self.epsilon]
        chosen = [entry for entry in passing if best.quality - entry.quality <= (entry.quality_error or 0.0)][-1]
        reason = (
            f"{self.named(chosen)}, has the highest {self.measure.name} of the {len(passing)} layers with NC1 > "
            f"{self.epsilon:g}"
        )
        if chosen is not best:
            reason = (
                f"{self.named(chosen)}, is the deepest of the {len(passing)} layers with NC1 > {self.epsilon:g} whose "
                f"{self.measure.name} is within one standard error ({chosen.quality_error:.4f}) of the highest, "
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

    def _noted(self, chosen: Sequence[LayerCollapse], reason: str) -> ChosenLayer:
        """Return ``chosen`` with the notes that a user should see."""
        before = [layer for layer in self.layers if layer.role != "output"]
        notes = []
        if EARLY * (1 + max(map(before.index, chosen), default=0)) <= len(before):
            notes.append(
                f"the chosen layer is among the first {len(before) // EARLY} of {len(before)}, whose features tell "
                f"textures apart, not classes: compare with a deeper one, as --layer {self.penultimate}"
            )
        return ChosenLayer(tuple(layer.name for layer in chosen), reason, tuple(notes), self)

    def nc4_of(self, chosen: ChosenLayer) -> float | None:
        """Return NC4 of the chosen layer, of two the higher; None where another quality was measured."""
        return max(self.layer(name).quality for name in chosen.layers) if self.measure.of_means else None

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON types."""
        return {**asdict(self), "measure": self.measure.name}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CollapseReport:
        """Return the report whose fields :meth:`to_json` returned."""
        layers = tuple(
            LayerCollapse(**{**entry, "shape": tuple(entry["shape"]), "grid": tuple(entry["grid"])})
            for entry in data["layers"]
        )
        stored = {**data, "measure": MEASURES[data["measure"]]}
        return cls(layers, *(stored[part.name] for part in fields(cls)[1:]))


def to_text(report: CollapseReport, chosen: ChosenLayer) -> str:
    """Return a table of all layers, with the chosen layer marked and its reason below."""
    rows = [["#", "layer", "form", "channels×spatial", "NC1", report.measure.name]]
    for entry in report.layers:
        marks = ["◀ chosen"] if entry.name in chosen.layers else []
        marks += [entry.role] if entry.role != "hidden" else []
        numbers = [f"{entry.shape[0]}×{entry.shape[1]}", f"{entry.nc1:.4f}", f"{entry.quality:.4f}"]
        rows.append([str(entry.index), entry.name, entry.form, *numbers, "  ".join(marks)])
    lines = [*align(rows, left={1, 2, 6}), f"chosen layer: {chosen.reason}", *(f"note: {n}" for n in chosen.notes)]
    if report.penultimate not in chosen.layers:
        lines.append(f"penultimate: {report.named(report.layer(report.penultimate))}, for comparison (DDU)")
    return "\n".join(lines)


def to_csv(report: CollapseReport) -> str:
    """Return a header and one line for each layer, as CSV."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["index", "layer", "form", "channels", "spatial", "role", "nc1", report.measure.column])
    for entry in report.layers:
        writer.writerow([entry.index, entry.name, entry.form, *entry.shape, entry.role, entry.nc1, entry.quality])
    return text.getvalue()


def layer_groups(layers: Sequence[LayerInfo], classes: int, batch_images: int, budget: int) -> list[LayerGroup]:
    """Return the layers, in order, in groups whose class means and batch features fit ``budget``, bytes.

    A group has several layers, each read whole in one pass, or one layer, read in ranges of columns.
    """
    groups: list[LayerGroup] = []
    together: list[LayerInfo] = []
    free = budget
    for layer in layers:
        width = math.prod(layer.shape)
        features, means = 4 * batch_images * width, 8 * classes * width
        if together and features + means > free:
            groups.append((together, [slice(None)]))
            together, free = [], budget
        if features + means <= budget:
            together.append(layer)
            free -= features + means
        else:
            step = min(width, max(MIN_COLUMNS, (budget - features) // (8 * classes)))
            groups.append(([layer], [slice(start, start + step) for start in range(0, width, step)]))
    return [*groups, (together, [slice(None)])] if together else groups


def columns_of(features: Sequence[Tensor], columns: slice) -> list[Tensor]:
    """Return a range of the columns (batch, columns) of each layer's features."""
    return [layer.flatten(1)[:, columns] for layer in features]


def layers_to_measure(net: nn.Module, trial: Inputs, settings: FitSettings) -> list[LayerInfo]:
    """Return the layers of the pattern and the penultimate one."""
    every = list_layers(net, trial, granularity=settings.granularity)
    names = {layer.name for layer in select_layers(every, settings.layers)}
    return [layer for layer in every if layer.name in names or layer.role == "penultimate"]


def check_named(net: nn.Module, trial: Inputs, settings: FitSettings) -> None:
    """Require, before any image is measured, layers that the settings name."""
    wanted = layers_to_measure(net, trial, settings)
    if settings.layer != "auto":
        check_layer(settings.layer, wanted)


def measure_layers(
    net: nn.Module,
    train: ImageDataset,
    selection: ImageDataset,
    settings: FitSettings,
    compute: Compute,
    quality_type: type[LayerQuality],
    kept: KeptFeatures | None = None,  # gets the features of the last layers for the training images
) -> CollapseReport:
    """Measure NC1 on ``train`` and another quality on ``selection`` after the layers of ``net``.

    Each process reads its own shard.  The network is moved to the device and put in evaluation mode; it runs as it is
    served, but in float32 whatever the precision, so that the choice of the layer does not depend on it.  The
    penultimate layer is measured whatever the pattern of names.
    """
    compute = replace(compute, precision="fp32")
    trial = trial_input(train.preprocess).to(compute.device)
    wanted = layers_to_measure(net.to(compute.device), trial, settings)
    sums = {layer.name: torch.zeros(3, dtype=torch.float64) for layer in wanted}
    quality = quality_type(train, selection, compute)
    groups = layer_groups(wanted, len(train.classes), compute.batch_size, compute.device_memory)
    if kept is not None:
        kept.make_room({layer.name: layer.shape for layer in wanted if layer.role != "output"})
    for number, group in enumerate(groups, 1):
        backbone = truncate(net, [layer.name for layer in group[0]], keep_output=False, trial=trial)
        label = f"collapse {number}/{len(groups)}"
        quality.read(backbone, group, _rounds(backbone, group, train, compute, sums, label, kept), label)
    measured = tuple(
        LayerCollapse(
            **vars(layer),
            # Constant features have collapsed, whatever the rounding of their values knows of the classes.
            nc1=CONSTANT if is_rounding(sums[layer.name]) else nc1_of(sums[layer.name]),
            quality=quality.value(layer.name),
        )
        for layer in wanted
    )
    report = CollapseReport(
        measured, settings.epsilon, settings.granularity, settings.layers, train.examples, selection.examples,
        settings.seed, quality_type,
    )  # fmt: skip
    if (best := report.best) is None:
        return report
    errors = (replace(layer, quality_error=quality.error(layer.name, best.name)) for layer in measured)
    return replace(report, layers=tuple(errors))


def _rounds(
    backbone: Backbone,
    group: LayerGroup,
    train: ImageDataset,
    compute: Compute,
    sums: Mapping[str, Tensor],
    label: str,
    kept: KeptFeatures | None,
) -> Iterator[Round]:
    """Yield the rounds of a group with their class means, each after a pass over the training images into ``sums``."""
    shard, step = compute.shard(train), feature_step(backbone, "fp32")
    layers, ranges = group
    of_group = None if kept is None else kept.of([layer.name for layer in layers])
    for columns in ranges:
        widths = (len(range(math.prod(layer.shape))[columns]) for layer in layers)
        statistics = [ClassScatter(len(train.classes), width, compute.device) for width in widths]
        take = partial(columns_of, columns=columns)
        add_statistics(statistics, shard, compute, f"{label}: class statistics", step, take, kept=of_group)
        for layer, scatter in zip(layers, statistics, strict=True):
            sums[layer.name].add_(scatter_sums(scatter))
            check_finite([layer], sums[layer.name][:2].sum()[None], train)
        yield columns, [scatter.means for scatter in statistics]
