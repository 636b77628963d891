"""Measure a fitted model of any task on test images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from psc_core.bundle import HISTORY
from psc_core.data.cache import REPEATED, shared_images
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.base import Report
from psc_core.model import FittedModel
from psc_core.settings import BATCH_IMAGES


class Evaluation(NamedTuple):
    """A report, and the scored images behind it, in the form of the model's task."""

    report: Report
    inside: Any  # in-distribution images
    outside: Mapping[str, Any]  # out-of-distribution images, by name


def check_images(model: FittedModel, data: ImageDataset) -> None:
    """Raise :class:`DataError` unless the test images are labelled with what the model predicts."""
    model.task.check_images(model.classes, data)


def seen_warning(model: FittedModel, data: ImageDataset, fitted_on: Mapping[str, ImageDataset]) -> str:
    """Return a warning, or "", if more test images than a few duplicates have fitted or calibrated the model."""
    nouns, provenance = {"train": "training", "val": "validation"}, model.report.get("provenance", {})
    recorded = [(noun, provenance.get(split)) for split, noun in nouns.items()]
    recorded += [("calibration", entry) for entry in provenance.get(HISTORY, ())]
    digest = data.digest()
    counts = [
        (noun, len(data)) for noun, entry in recorded if isinstance(entry, dict) and entry.get("sha256") == digest
    ]
    counts += [(nouns[split], shared_images(images, data)) for split, images in fitted_on.items()]
    for noun, count in counts:
        if count > REPEATED * len(data):
            return (
                f"{count} of the {len(data)} images of {data.name} are {noun} images of the model; what is measured on "
                "them does not hold for new ones, so give images that it has not seen"
            )
    return ""


def evaluate(
    model: FittedModel,
    id_data: ImageDataset,
    ood: Mapping[str, ImageDataset],
    baselines: Any = None,  # detectors on the same network, or None to evaluate the model alone
    *,
    batch_images: int = BATCH_IMAGES,
) -> Evaluation:
    """Send every data set through the served path once, and compare."""
    task = model.task.evaluator()
    check_images(model, id_data)
    inside = task.score_images(model, id_data, baselines, batch_images=batch_images)
    outside = {name: task.score_images(model, data, baselines, batch_images=batch_images) for name, data in ood.items()}
    return Evaluation(task.compare(model, id_data, inside, outside), inside, outside)
