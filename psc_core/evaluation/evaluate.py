"""Measure a fitted model of any task on test images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from psc_core.compute import BATCH_IMAGES
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.base import Report
from psc_core.model.base import FittedModel
from psc_core.tasks import module_of
from psc_core.tasks.fit.task import task_fit


class Evaluation(NamedTuple):
    """A report, and the scored images behind it, in the form of the model's task."""

    report: Report
    inside: Any  # in-distribution images
    outside: Mapping[str, Any]  # out-of-distribution images, by name


def check_images(model: FittedModel, data: ImageDataset) -> None:
    """Raise :class:`DataError` unless the test images are labelled with what the model predicts."""
    task_fit(model.task.name).check_same(model.task, model.classes, data)


def evaluate(
    model: FittedModel,
    id_data: ImageDataset,
    ood: Mapping[str, ImageDataset],
    baselines: Any = None,
    *,
    batch_images: int = BATCH_IMAGES,
) -> Evaluation:
    """Send every data set through the served path once, and compare.

    Args:
        model: The fitted model, whose policy sets α and coverage.
        id_data: In-distribution test images with their labels or numbers, none of them used to fit or calibrate.
        ood: Out-of-distribution images by name; labels and numbers are ignored.
        baselines: Detectors on the same network, or None to evaluate the model alone.
        batch_images: Maximum number of images in a batch.

    Raises:
        DataError: If the data has other classes or numbers than the model.
        UsageError: If data is read through another preprocessing.
    """
    task = module_of(model.task.name, "psc_core.evaluation.{}")
    check_images(model, id_data)
    inside = task.score_images(model, id_data, baselines, batch_images=batch_images)
    outside = {name: task.score_images(model, data, baselines, batch_images=batch_images) for name, data in ood.items()}
    return Evaluation(task.compare(model, id_data, inside, outside), inside, outside)
