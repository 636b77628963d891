"""Extend the densities of a bundle with images that people labelled, outside the audit slice.

The input is a fitted model, m labelled images that people chose as they liked, and a few audit images that calibrate
nothing; the output is an :class:`Extension`, the model's pipeline with extended densities.  Images of the slice
calibrate, so none of them may extend anything.

The density and that of an early layer see each of the m images as one more training image
(:mod:`psc_core.density.fit.extend`), or as several equal ones: of a new camera there are few images, of the old one
perhaps a million.  How many it stands for is chosen by AUROC on made-up images, as a fit chooses its gates
(:mod:`psc_core.gates.fit.choice`): the audit images are real, and altered ones are out of distribution.  The number of
:data:`TIMES` with the least regret is chosen, among those that lose at most :data:`LARGEST_LOSS` of AUROC on every
transform; 0 leaves model and gates as they are.  Extended densities give other readings, so the p-values of their gates
come from the same real images; those of 0 do too while they are compared, or the gates would win and not the density.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.density.fit.extend import EXAMPLES, can_extend, extend_density
from psc_core.errors import UsageError
from psc_core.gates.combined import DENSITY, Gates, readings_of
from psc_core.gates.fit.choice import KINDS_KEY, Auroc, regret
from psc_core.gates.fit.combined import fit_gates
from psc_core.gates.fit.made_up import MIXED, REAL, by_transform, made_up_batches
from psc_core.images.preprocess import Pixels
from psc_core.metrics.ranking import auroc
from psc_core.model.base import FittedModel
from psc_core.model.pipeline import Pipeline, Scorer
from psc_core.tables import aligned
from psc_core.tasks.fit.task import task_fit

TIMES: Final = (0, 1, 10, 100)
"""Numbers of training images that one image may stand for."""

LARGEST_LOSS: Final = 0.02
"""AUROC that an extended density may lose on a transform of made-up images."""


@dataclass(frozen=True)
class Extension:
    """A pipeline with extended densities, and the comparison that chose how far."""

    pipeline: Pipeline  # has to be calibrated again
    images: int  # number that were given to extend the densities
    times: int  # training images that each stands for, one of :data:`TIMES`
    aurocs: Mapping[int, Auroc]  # by times, then by transform

    def table(self) -> str:
        """Return a line for each number of times, with the AUROC of each transform."""
        rows = [["times", *self.aurocs[0]]]
        for times, of_transform in self.aurocs.items():
            numbers = (f"{value:.4f}" for value in of_transform.values())
            rows.append([str(times), *numbers, "◀ chosen" * (times == self.times)])
        head = f"AUROC on made-up images; each of the {self.images} images outside the slice counts this many times:"
        return "\n".join([head, *aligned(rows)])

    def warning(self) -> str:
        """Return the reason why the densities stay as they are; empty where they change."""
        if self.times:
            return ""
        return (
            f"the density stays as it is: with these {self.images} images it is no better on made-up images, or loses "
            f"more than {LARGEST_LOSS:g} of AUROC on a transform of them; check their labels, or give more"
        )

    def to_json(self) -> dict[str, Any]:
        """Return the extension as a bundle records it, in JSON types."""
        before, after = self.aurocs[0], self.aurocs[self.times]
        return {
            "images": self.images,
            "times": self.times,
            KINDS_KEY: list(before),
            "auroc_before": [*before.values()],
            "auroc_after": [*after.values()],
        }


class _DensityInputs(NamedTuple):
    """The features of n images that the densities read, on the CPU."""

    density_input: Float[Tensor, "n dim"]
    early: Float[Tensor, "n channels"] | None  # of the gate ``texture``; None for a model without
    labels: Int[Tensor, " n"]


def seen_examples(model: FittedModel) -> int:
    """Return the number of labelled examples that the densities of a model were fitted to.

    Raises:
        UsageError: If the densities cannot be extended.
    """
    instead = "fit the bundle again with these images among the training images, or leave out --extend-density"
    if why_not := task_fit(model.task.name).why_not_extended:
        raise UsageError(f"{why_not}; {instead}")
    density = model.pipeline.scorer.density
    if not can_extend(type(density)):
        raise UsageError(f"a density {density.kind!r} has tensors that more images cannot extend; {instead}")
    in_manifest = model.report.get("provenance", {}).get("train", {}).get("rows")  # Where the density does not say.
    found = density.record.get(EXAMPLES, in_manifest)
    if not isinstance(found, int):
        raise UsageError(f"the bundle of {model.name} does not say how many examples its density has seen; {instead}")
    return found


def extend(model: FittedModel, more: ImageDataset, real: ImageDataset, compute: Compute) -> Extension:
    """Extend the densities of a model where that is better on made-up images.

    Args:
        model: The model of a bundle.
        more: At least one image, labelled with a class of the model, that calibrates nothing.
        real: In-distribution images as they are sent now, which neither extend nor calibrate anything.
        compute: Device and batch size.

    Raises:
        UsageError: If the densities cannot be extended.
        DataError: If an image cannot be read.
        FitError: If features are not finite, or gates cannot be fitted to the readings.
    """
    examples = seen_examples(model)
    read = _read(model.pipeline.scorer, more, compute)
    pipelines = {times: extended(model.pipeline, read, examples, times) if times else model.pipeline for times in TIMES}
    transforms = model.report.get("metrics", {}).get("gates", {}).get(KINDS_KEY, ())
    scorers = {times: pipeline.scorer for times, pipeline in pipelines.items()}
    names = model.gates or (DENSITY,)
    readings = _made_up_readings(scorers, names, real, compute, mixed=MIXED in transforms)
    inside = {times: of_transform[REAL] for times, of_transform in readings.items()}
    gates = {times: fit_gates(names, inside[times], inside[times]) if model.gates else None for times in TIMES}
    aurocs = {times: _aurocs(gates[times], readings[times]) for times in TIMES}
    chosen = _choose(aurocs)
    pipeline = pipelines[chosen].with_scorer(scorers[chosen], gates=gates[chosen]) if chosen else model.pipeline
    return Extension(pipeline, len(more), chosen, aurocs)


def extended(pipeline: Pipeline, read: _DensityInputs, examples: int, times: int) -> Pipeline:
    """Return a pipeline whose densities have seen more images, each of them ``times`` times."""
    scorer, texture = pipeline.scorer, None
    found = extend_density(scorer.density, read.density_input, read.labels, examples=examples, times=times)
    if scorer.texture is not None and read.early is not None:
        texture = extend_density(scorer.texture, read.early, read.labels, examples=examples, times=times).density
    thumbnails = None if pipeline.thumbnails is None else pipeline.thumbnails.moved(found.moved)
    return pipeline.with_scorer(scorer.with_densities(found.density, texture), thumbnails=thumbnails)


def _choose(aurocs: Mapping[int, Auroc]) -> int:
    """Return the times with the least regret, on a tie the smallest, among those that lose little everywhere."""
    before = aurocs[0]
    allowed = [
        times for times in aurocs if all(value >= before[name] - LARGEST_LOSS for name, value in aurocs[times].items())
    ]
    named = {str(times): of_transform for times, of_transform in aurocs.items()}
    return min(allowed, key=lambda times: (regret(named, str(times)), times))


def _aurocs(gates: Gates | None, readings: Mapping[str, Float[Tensor, "n gates"]]) -> dict[str, float]:
    if gates is None:
        scores = {name: values[:, 0] for name, values in readings.items()}
    else:
        device = gates.ascending.device
        scores = {name: gates.score(values.to(device)).cpu() for name, values in readings.items()}
    return {name: auroc(scores[REAL], altered) for name, altered in scores.items() if name != REAL}


@torch.inference_mode()
def _read(scorer: Scorer, data: ImageDataset, compute: Compute) -> _DensityInputs:
    inputs, early, labels = [], [], []
    for batch in track_images(data, compute, "images more"):
        embedding = scorer.embed(batch.images.to(compute.device))
        inputs.append(embedding.density_input.cpu())
        early += [] if embedding.early is None else [embedding.early.cpu()]
        labels.append(batch.first_labels())
    return _DensityInputs(torch.cat(inputs), torch.cat(early) if early else None, torch.cat(labels))


def _made_up_readings(
    scorers: Mapping[int, Scorer], names: tuple[str, ...], real: ImageDataset, compute: Compute, *, mixed: bool
) -> dict[int, dict[str, Float[Tensor, "n gates"]]]:
    """Return readings (n, gates) by times, then by transform; the scorers differ in their densities alone."""

    def read(images: Pixels) -> dict[int, Tensor]:
        embedding = scorers[0].embed(images)
        return {times: readings_of(names, scorer.score(embedding).scores) for times, scorer in scorers.items()}

    found = by_transform(made_up_batches(real, compute, "made-up images", mixed=mixed, seed=0), read)
    return {times: {name: of_transform[times] for name, of_transform in found.items()} for times in scorers}
