"""Collect the contents of a report, from passes of images through the path that serves.

At most :data:`REPORTED_IMAGES` of a set are looked at after a fit, drawn at random, so that a report
costs little beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset, balanced
from psc_core.evaluation.evaluate import Evaluation
from psc_core.fitting.data import FitData
from psc_core.gates.fit.made_up import REAL, made_up_batches
from psc_core.model.base import FittedModel
from psc_core.projection.fit.report import ProjectionReport
from psc_core.report.content import Content, Role, ScoredSet
from psc_core.tasks import module_of

REPORTED_IMAGES: Final = 2000
"""Maximum number of images of a set, for a report of a fit."""


def collect_fit(
    model: FittedModel, net: nn.Module, data: FitData, projection: ProjectionReport, compute: Compute, version: str
) -> Content:
    """Collect training images, images of the calibration split beside the network's own output, and made-up images.

    Args:
        model: Just fitted.
        net: The whole network.
        data: The images of the fit.
        projection: What fitting it measured.
        compute: Device, precision, batch size.
        version: Of the bundle that the model is saved as.
    """
    name, seed = model.task.name, data.seed
    evaluation, sets = (module_of(name, f"psc_core.{floor}") for floor in ("evaluation.{}", "report.{}.sets"))
    trained, validation = (balanced(images, REPORTED_IMAGES, seed) for images in (data.train, data.calibration))
    own = evaluation.own_network(net, validation, compute)
    beside_own = evaluation.score_images(model, validation, own, batch_images=compute.batch_images)
    of_training = evaluation.score_images(model, trained, batch_images=compute.batch_images)
    known = (
        sets.scored_set("training", Role.TRAINING, trained, of_training),
        sets.scored_set("validation", Role.VALIDATION, validation, beside_own),
    )
    made_up = made_up_sets(model, data.selection, compute, mixed=not data.is_ambiguous, seed=seed)
    sizes = {"nc1": projection.nc1.cpu(), "nc4": projection.nc4.cpu()}
    return Content(version, (*known, *made_up), sets.pictures_of(validation, beside_own), sizes)


def collect_test(
    model: FittedModel, id_data: ImageDataset, ood: Mapping[str, ImageDataset], found: Evaluation
) -> Content:
    """Collect what an evaluation found for the images of ``id_data`` and, by name, for out-of-distribution ones."""
    sets = module_of(model.task.name, "psc_core.report.{}.sets")
    outside = (sets.scored_set(name, Role.OOD, ood[name], scored) for name, scored in found.outside.items())
    inside = sets.scored_set("test", Role.TEST, id_data, found.inside)
    return Content(model.version, (inside, *outside), sets.pictures_of(id_data, found.inside))


def made_up_sets(
    model: FittedModel, selection: ImageDataset, compute: Compute, *, mixed: bool, seed: int
) -> list[ScoredSet]:
    """Score images made from those of the selection split, by kind; the last arguments are of ``made_up_batches``."""
    sets = module_of(model.task.name, "psc_core.report.{}.sets")
    packed: dict[str, list[Tensor]] = {}
    with torch.inference_mode():
        for made in made_up_batches(selection, compute, "report: made-up images", mixed=mixed, seed=seed):
            for kind in made.keys() - {REAL}:
                packed.setdefault(kind, []).append(model.pipeline(made[kind]).cpu())
    return [sets.made_up_set(kind, model, torch.cat(parts)) for kind, parts in sorted(packed.items())]
