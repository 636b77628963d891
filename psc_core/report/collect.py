"""Collect the content of a report from passes of images through the path that a service uses.

After a fit at most :data:`REPORTED_IMAGES` random images of a set are used, so that the report costs little compared to
the fit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from psc_core.compute import Compute
from psc_core.data.dataset import ImageDataset, balanced
from psc_core.evaluation.evaluate import Evaluation
from psc_core.fit_data import FitData
from psc_core.model import FittedModel
from psc_core.projection import ProjectionReport
from psc_core.report.content import Content, Role, ScoredSet
from psc_core.synthetic import REAL, synthetic_batches

REPORTED_IMAGES: Final = 2000  # maximum number of images of a set in the report of a fit


def collect_fit(
    model: FittedModel, net: nn.Module, data: FitData, projection: ProjectionReport, compute: Compute, version: str
) -> Content:
    """Collect training images, calibration images with the network's own output, and synthetic OOD images."""
    evaluation, sets, seed = model.task.evaluator(), model.task.report(), data.seed
    trained, validation = (balanced(images, REPORTED_IMAGES, seed) for images in (data.train, data.calibration))
    plain = evaluation.original_network(net, validation, compute)
    of_validation = evaluation.score_images(model, validation, plain, batch_images=compute.batch_images)
    of_training = evaluation.score_images(model, trained, batch_images=compute.batch_images)
    known = (
        sets.scored_set("training", Role.TRAINING, trained, of_training),
        sets.scored_set("validation", Role.VALIDATION, validation, of_validation),
    )
    synthetic = synthetic_sets(model, data.selection, compute, mixed=not data.is_ambiguous, seed=seed)
    sizes = {"nc1": projection.nc1.cpu(), "nc4": projection.nc4.cpu()}
    return Content(version, (*known, *synthetic), sets.pictures_of(validation, of_validation), sizes)


def collect_test(
    model: FittedModel, id_data: ImageDataset, ood: Mapping[str, ImageDataset], found: Evaluation
) -> Content:
    """Collect the results of an evaluation for the images of ``id_data`` and for each out-of-distribution set."""
    sets = model.task.report()
    outside = (sets.scored_set(name, Role.OOD, ood[name], scored) for name, scored in found.outside.items())
    inside = sets.scored_set("test", Role.TEST, id_data, found.inside)
    return Content(model.version, (inside, *outside), sets.pictures_of(id_data, found.inside))


def synthetic_sets(
    model: FittedModel, selection: ImageDataset, compute: Compute, *, mixed: bool, seed: int
) -> list[ScoredSet]:
    """Score images made from the selection split, by transform; see ``synthetic_batches`` for ``mixed``, ``seed``."""
    sets = model.task.report()
    packed: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for made in synthetic_batches(selection, compute, "report: synthetic OOD images", mixed=mixed, seed=seed):
            for transform in made.keys() - {REAL}:
                packed.setdefault(transform, []).append(model.pipeline(made[transform]).cpu())
    return [sets.synthetic_set(transform, model, torch.cat(parts)) for transform, parts in sorted(packed.items())]
