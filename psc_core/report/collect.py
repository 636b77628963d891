"""What a report shows, from passes of images through the path that serves.

At most :data:`IMAGES` of a set are looked at after a fit, drawn at random, so that a report costs little beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from psc_core.data.dataset import ImageDataset, balanced, split_validation
from psc_core.evaluation.evaluate import ScoredImages, classification_of, score_images
from psc_core.evaluation.own import OwnNetwork
from psc_core.evaluation.report import PRIMARY
from psc_core.evaluation.values import ScoredNumbers, errors_of, numbers_of, score_numbers
from psc_core.fitting.checks import own_error
from psc_core.fitting.options import FitOptions
from psc_core.gates.fit.made_up import REAL, is_ambiguous, made_up_batches
from psc_core.model.load import Model
from psc_core.model.regressor import PSCRegressor
from psc_core.projection.fit.report import ProjectionReport
from psc_core.report.content import Content, ImageSet, Picture, Role, ScoredSet, ValueSet

IMAGES: Final = 2000
"""Maximum number of images of a set, for a report of a fit."""

CLASSES: Final = 20
"""Maximum number of classes whose images are shown."""

EACH: Final = 3
"""Pictures of a class that are shown for each reason."""

SIDE: Final = 96
"""Maximum height and width of a picture, pixels."""


def collect_fit(
    model: Model,
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: ProjectionReport,
    options: FitOptions,
) -> Content:
    """Training images, images of the calibration split beside the network's own output, and made-up images.

    A regression has no pictures.
    """
    selection, calibration_split = split_validation(val, options.seed)
    trained = balanced(train, IMAGES, options.seed)
    validation = balanced(calibration_split, IMAGES, options.seed)
    size = options.batch_images
    known: tuple[ScoredSet, ...]
    pictures: tuple[Picture, ...] = ()
    if isinstance(model, PSCRegressor):
        own_rmse = own_error(net, validation, options.compute(), options.seed, IMAGES)
        numbers = score_numbers(model, validation, batch_images=size)
        known = (
            value_set("training", Role.TRAINING, score_numbers(model, trained, batch_images=size), trained),
            value_set("validation", Role.VALIDATION, numbers, validation, own_rmse=own_rmse),
        )
    else:
        own = OwnNetwork.of(net, val, options.compute())
        scored = score_images(model, validation, own, batch_images=size)
        known = (
            image_set("training", Role.TRAINING, trained, score_images(model, trained, batch_images=size)),
            image_set("validation", Role.VALIDATION, validation, scored),
        )
        pictures = pictures_of(validation, scored)
    made_up = made_up_sets(model, selection, is_ambiguous(train) or is_ambiguous(val), options)
    sizes = {"nc1": projection.nc1.cpu(), "nc4": projection.nc4.cpu()}
    return Content(model.version, (*known, *made_up), pictures, sizes)


def image_set(name: str, role: Role, data: ImageDataset, scored: ScoredImages) -> ImageSet:
    """The part of the scores of ``data`` that reports show."""
    return ImageSet(
        name,
        role,
        scored.ood[PRIMARY].float(),
        scored.entropy[PRIMARY].float(),
        scored.predicted,
        data.first_labels() if scored.losses else torch.empty(0, dtype=torch.int64),
        {classifier: losses.confidence.float() for classifier, losses in scored.losses.items()},
        {classifier: losses.correct for classifier, losses in scored.losses.items()},
        quality=classification_of(scored.losses),
        groups=_groups(data),
    )


def value_set(
    name: str, role: Role, scored: ScoredNumbers, data: ImageDataset | None = None, *, own_rmse: float | None = None
) -> ValueSet:
    """The part of a regression's ``scored`` numbers that reports show.

    Args:
        name: Of the set.
        role: Of the set.
        scored: What the regression gives for the images.
        data: The images; None for made-up ones.
        own_rmse: RMSE of the network itself, the target's unit, where it is known.
    """
    values = None if data is None or not role.is_known else data.values
    quality = {} if own_rmse is None else {"base": {"rmse": own_rmse}}
    return ValueSet(
        name,
        role,
        scored.ood_score,
        scored.mean,
        scored.deviation,
        torch.empty(0, dtype=torch.float64) if values is None else values,
        quality=quality if values is None else {**quality, PRIMARY: errors_of(scored, values)},
        groups={} if data is None else _groups(data),
    )


def _groups(data: ImageDataset) -> Mapping[str, Tensor]:
    """The parts of a data set; none where it is one part."""
    return data.groups if len(data.groups) > 1 else {}


def made_up_sets(model: Model, selection: ImageDataset, ambiguous: bool, options: FitOptions) -> list[ScoredSet]:
    """Images made from those of the selection split, by kind."""
    packed: dict[str, list[Tensor]] = {}
    batches = made_up_batches(
        selection, options.compute(), "report: made-up images", mixed=not ambiguous, seed=options.seed
    )
    with torch.inference_mode():
        for made in batches:
            for kind in made.keys() - {REAL}:
                packed.setdefault(kind, []).append(model.pipeline(made[kind]).cpu())
    none = torch.empty(0, dtype=torch.int64)
    sets: list[ScoredSet] = []
    for kind, parts in sorted(packed.items()):
        if isinstance(model, PSCRegressor):
            sets.append(value_set(kind, Role.MADE_UP, numbers_of(model, torch.cat(parts))))
            continue
        outputs = model.outputs(torch.cat(parts))
        scores, predicted = outputs["ood_score"].float(), outputs.probabilities.argmax(1)
        sets.append(ImageSet(kind, Role.MADE_UP, scores, outputs["predictive_entropy"].float(), predicted, none))
    return sets


def pictures_of(data: ImageDataset, scored: ScoredImages) -> tuple[Picture, ...]:
    """The most unusual, the most ambiguous and the most typical images of the first :data:`CLASSES` classes."""
    labels, score, entropy = data.first_labels(), scored.ood[PRIMARY], scored.entropy[PRIMARY]
    ranked: Mapping[str, Tensor] = {"most unusual": -score, "most ambiguous": -entropy, "most typical": score}
    return tuple(
        Picture(
            why, label, int(scored.predicted[at]), float(score[at]), float(entropy[at]), thumbnail(data, at)
        )
        for label in range(min(CLASSES, len(data.classes)))
        for why, order in ranked.items()
        for at in _first(order, labels == label)
    )  # fmt: skip


def thumbnail(data: ImageDataset, index: int) -> Tensor:
    """An image as the network sees it, ``uint8 (channels, height, width)``, at most :data:`SIDE` high and wide."""
    image = torch.from_numpy(data.image(index))
    longest = max(image.shape[1:])
    if longest <= SIDE:
        return image
    size = [max(1, round(side * SIDE / longest)) for side in image.shape[1:]]
    smaller = functional.interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]
    return smaller.round().clamp(0, 255).to(torch.uint8)


def _first(order: Tensor, chosen: Tensor) -> list[int]:
    """Positions of the :data:`EACH` smallest values of ``order`` among the chosen."""
    positions = chosen.nonzero().flatten()
    kept: list[int] = positions[order[positions].argsort(stable=True)[:EACH]].tolist()
    return kept
