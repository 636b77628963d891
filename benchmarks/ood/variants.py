"""Variants of PSC, and the same densities and heads on the penultimate layer.

Feature vectors (*spaces*):

* ``psc-GRANULARITY``: z of the candidate layer selected among layers of that granularity;
* ``pooled-GRANULARITY``: the same layer averaged over positions, without projection (its ``gda++ all`` is
  ``psc-fit --density pooled++``);
* ``penultimate``: the input of the last linear layer.

Densities on each: ``gda``, ``tied``, the same with unit length (``gda++``, ``mahalanobis++``) and ``rmd``, on the
principal components that explain 99 % of the variance (``99%``) or on all of them (``all``).  Entropy and epistemic
uncertainty of heads: ``laplace`` on every ``psc-GRANULARITY`` and on ``penultimate``, ``sngp`` and ``duq`` on
``psc-operations``.

``psc-fit gates`` is the OOD score of a model fitted with the defaults of ``psc-fit`` on the layer of
``psc-operations``.

Sums ``a + b`` of two scores, each in its upper spread over validation images: a density and its head's uncertainty, or
the same density on the penultimate layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks import fitting
from benchmarks.checkpoints import Trained
from benchmarks.fitting import Stages
from benchmarks.ood.detector import Detector, Score, Spaces, memory_bytes, scored
from benchmarks.runs import Run
from psc_core.compute.passes import passes
from psc_core.data.dataset import ImageDataset
from psc_core.density import DENSITIES, Density
from psc_core.density.fit.density import fit_density
from psc_core.evaluation.baselines import full_density, knn_score, max_softmax_score
from psc_core.fitting.calibrate import upper_spread
from psc_core.heads import HEADS, entropy
from psc_core.heads.fit.head import fit_head
from psc_core.heads.fit.temperature import fit_temperature
from psc_core.model.predictor import PSC
from psc_core.network.backbone import Backbone, example_input, truncate
from psc_core.projection.module import Projection

DEFAULT = "psc-fit gates"
"""The default of ``psc-fit``: ``--ood-score gates``."""

DENSITY = "pooled-operations gda++ all"
"""``psc-fit --ood-score density``."""

WITH_ENTROPY = f"{DENSITY} + psc-operations laplace entropy"
"""``psc-fit --ood-score density+entropy``."""

PAPER = "psc-operations gda 99%"
"""The paper's density: ``--density gda``."""

PENULTIMATE = ("penultimate gda all", "penultimate gda++ all")
"""One Gaussian for each class on penultimate features, without and with unit length."""

COMPONENTS = ("99%", "all")

BATCH_IMAGES = 256

POOLED = ("gda++", "all")
"""Kind and components of ``psc-fit --density pooled++`` on a pooled space."""


@dataclass(frozen=True)
class Extractor:
    """One pass of the network that gives every space.

    Attributes:
        backbone: Cut behind all layers that a space reads; keeps the logits.
        projections: By granularity.
        layers: Candidate layers by granularity.
        penultimate: Name of the penultimate layer.
    """

    backbone: Backbone
    projections: Mapping[str, Projection]
    layers: Mapping[str, tuple[str, ...]]
    penultimate: str

    def __call__(self, images: Tensor) -> dict[str, Tensor]:
        """Spaces, ``"penultimate"`` and ``"logits"`` of standardised images."""
        outputs, logits = self.backbone(images)
        if logits is None:
            raise RuntimeError("the backbone of an extractor keeps its output")
        by_name = dict(zip(self.backbone.layers, outputs, strict=True))
        found = {"penultimate": by_name[self.penultimate].float().mean(2), "logits": logits.double()}
        for granularity, projection in self.projections.items():
            features = [by_name[name] for name in self.layers[granularity]]
            found[f"psc-{granularity}"] = projection(features)
            found[f"pooled-{granularity}"] = torch.cat([f.float().mean(2) for f in features], dim=1)
        return found


def extractor(run: Run, trained: Trained, stages: Mapping[str, Stages]) -> Extractor:
    """Cut the network once for all granularities."""
    penultimate = fitting.penultimate_layer(trained)
    layers = {granularity: parts.candidate.layers for granularity, parts in stages.items()}
    wanted = dict.fromkeys([*(name for names in layers.values() for name in names), penultimate])
    example = example_input(trained.train.preprocess).to(run.device)
    backbone = truncate(trained.net, list(wanted), keep_output=True, example=example)
    projections = {granularity: parts.projection.projection.to(run.device) for granularity, parts in stages.items()}
    return Extractor(backbone, projections, layers, penultimate)


def spaces_of(run: Run, extract: Extractor, data: ImageDataset, *, per_example: bool) -> Spaces:
    """Every space of a data set; one entry for each labelled example, or for each image."""
    parts: dict[str, list[Tensor]] = {}
    for found, batch in passes(data, fitting.compute_of(run), f"features of {data.name}", extract):
        for name, values in found.items():
            parts.setdefault(name, []).append((batch.per_example(values) if per_example else values).cpu())
    joined = {name: torch.cat(values) for name, values in parts.items()}
    labels = data.labels if per_example else data.first_labels()
    return Spaces(joined.pop("penultimate"), joined.pop("logits"), labels, joined)


def with_scores(psc: PSC, images: Spaces, data: ImageDataset) -> Spaces:
    """``images`` with the OOD scores of a model as one more vector, ``psc-fit``."""
    scores = [torch.as_tensor(psc.predict(batch.images).ood_score) for batch in data.batches(BATCH_IMAGES)]
    return replace(images, vectors={**images.vectors, "psc-fit": torch.cat(scores)[:, None]})


def of_model(psc: PSC) -> Detector:
    """The OOD score of a model, with the size of all that comes behind its network."""
    tensors = psc.pipeline.state_dict()
    own = {name: value for name, value in tensors.items() if not name.startswith("scorer.backbone.")}
    return Detector(DEFAULT, "psc", lambda images: images.vectors["psc-fit"][:, 0], "psc-fit", memory_bytes(own))


def vector(images: Spaces, space: str) -> Tensor:
    """The feature vectors of one space."""
    return images.features if space == "penultimate" else images.vectors[space]


def fit_densities(run: Run, train: Spaces, classes: int) -> list[Detector]:
    """Every density on every space."""
    found = []
    for space in ("penultimate", *train.vectors):
        z, labels = vector(train, space).to(run.device), train.labels.to(run.device)
        for kind in (kind for kind, density in DENSITIES.items() if density.input_kind == "z"):
            for components in COMPONENTS:
                density = _density(z, labels, classes, kind, components)
                found.append(
                    Detector(
                        f"{space} {kind} {components}",
                        family(space, kind, components),
                        _by_density(density, space, run),
                        space,
                        memory_bytes(density),
                    )
                )
    return found


def family(space: str, kind: str, components: str) -> str:
    """``"psc"`` for what ``psc-fit`` can fit, else the name of the space."""
    served = space.startswith("psc") or (space.startswith("pooled") and (kind, components) == POOLED)
    return "psc" if served else space.partition("-")[0]


def _density(z: Tensor, labels: Tensor, classes: int, kind: str, components: str) -> Density:
    fit = full_density if components == "all" else fit_density
    return fit(z, labels, num_classes=classes, kind=kind)


def _by_density(density: Density, space: str, run: Run) -> Score:
    return lambda images: -density(vector(images, space).to(run.device)).log_density


def fit_heads(run: Run, train: Spaces, val: Spaces, classes: int) -> list[Detector]:
    """Entropy and epistemic uncertainty of every head on z and on the penultimate features."""
    found = []
    for space in ("penultimate", *(name for name in train.vectors if name.startswith("psc"))):
        for kind in HEADS if space == "psc-operations" else ("laplace",):
            head = fit_head(
                vector(train, space),
                train.labels,
                vector(val, space),
                val.labels,
                num_classes=classes,
                kind=kind,
                seed=run.seed,
                device=run.device,
            )
            scores: dict[str, Callable[[Tensor], Tensor]] = {
                "entropy": lambda z, head=head: entropy(head(z).probabilities),  # type: ignore[misc]
                "epistemic": lambda z, head=head: head(z).epistemic,  # type: ignore[misc]
            }
            for what, score in scores.items():
                found.append(
                    Detector(
                        f"{space} {kind} {what}",
                        "psc" if space.startswith("psc") else space,
                        _by_head(score, space, run),
                        space,
                        memory_bytes(head),
                    )
                )
    return found


def _by_head(score: Callable[[Tensor], Tensor], space: str, run: Run) -> Score:
    return lambda images: score(vector(images, space).to(run.device))


def fit_own_baselines(train: Spaces, val: Spaces) -> list[Detector]:
    """The scores of :mod:`psc_core.evaluation.baselines` other than densities."""
    temperature = fit_temperature(val.logits, val.labels)
    bank = F.normalize(train.features)
    scores: dict[str, Score] = {
        "max-softmax": lambda images: max_softmax_score(images.logits),
        "entropy": lambda images: entropy(images.logits.softmax(1)),
        "energy": lambda images: -images.logits.logsumexp(1),
        "temperature": lambda images: max_softmax_score(images.logits / temperature),
        "knn": lambda images: knn_score(F.normalize(images.features), bank),
    }
    return [
        Detector(
            f"{name} (psc_core)", "psc_core baseline", score, "penultimate", memory_bytes(bank) if name == "knn" else 0
        )
        for name, score in scores.items()
    ]


def sums(fitted: Sequence[Detector], known: Spaces) -> list[Detector]:
    """PSC's densities plus the Laplace head's uncertainty on z, or plus the density of the penultimate layer.

    Args:
        fitted: Single detectors.
        known: Validation examples that the spreads are measured on.
    """
    by_name = {detector.name: detector for detector in fitted}
    found = []
    for granularity in (name.removeprefix("psc-") for name in known.vectors if name.startswith("psc-")):
        heads = [f"psc-{granularity} laplace {what}" for what in ("entropy", "epistemic")]
        for density in ("gda 99%", "gda++ all"):
            first = by_name[f"psc-{granularity} {density}"]
            found += [_sum(first, by_name[other], known) for other in (*heads, f"penultimate {density}")]
        pooled = by_name[f"pooled-{granularity} {' '.join(POOLED)}"]
        found += [_sum(pooled, by_name[other], known) for other in heads]
    return found


def _sum(first: Detector, second: Detector, known: Spaces) -> Detector:
    scales = [upper_spread(scored(detector, known)) for detector in (first, second)]

    def score(images: Spaces) -> Tensor:
        parts = [scored(detector, images) for detector in (first, second)]
        return sum((part / scale for part, scale in zip(parts, scales, strict=True)), torch.zeros(()))

    what = second.name.removeprefix(f"{first.space} ")
    return Detector(f"{first.name} + {what}", "psc", score, second.space, first.memory_bytes + second.memory_bytes)
