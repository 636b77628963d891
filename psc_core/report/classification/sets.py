"""The data that a classifier's report keeps of a set of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.nn import functional

from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.base import PRIMARY
from psc_core.evaluation.classification import ScoredImages, quality_of
from psc_core.model import PSC
from psc_core.report.content import Picture, Role, ScoredSet, parts_of

CLASSES: Final = 20
"""Maximum number of classes whose images are shown."""

EACH: Final = 3
"""Number of pictures of a class for each reason."""

SIDE: Final = 96
"""Maximum height and width of a picture, in pixels."""


@dataclass(frozen=True)
class ClassificationSet(ScoredSet):
    """The scores of a classifier for n images."""

    entropy: Float[Tensor, " n"]  # predictive entropy, nats
    predicted: Int[Tensor, " n"]  # class index
    labels: Int[Tensor, " m"]  # first label of each image; empty for images of other classes
    confidence: Mapping[str, Float[Tensor, " examples"]] = field(default_factory=dict)  # by classifier
    correct: Mapping[str, Bool[Tensor, " examples"]] = field(default_factory=dict)  # by classifier


SET: Final = ClassificationSet
"""The type of the sets in a report."""


def scored_set(name: str, role: Role, data: ImageDataset, scored: ScoredImages) -> ClassificationSet:
    """Return the data that reports keep of the scores of ``data``."""
    return ClassificationSet(
        name,
        role,
        scored.ood[PRIMARY].float(),
        scored.entropy[PRIMARY].float(),
        scored.predicted,
        data.first_labels() if scored.losses else torch.empty(0, dtype=torch.int64),
        {classifier: losses.confidence.float() for classifier, losses in scored.losses.items()},
        {classifier: losses.correct for classifier, losses in scored.losses.items()},
        quality=quality_of(scored, data),
        groups=parts_of(data),
    )


def made_up_set(name: str, model: PSC, packed: Float[Tensor, "n columns"]) -> ClassificationSet:
    """Return the data that reports keep of the packed outputs for made-up images."""
    outputs, none = model.outputs(packed), torch.empty(0, dtype=torch.int64)
    entropies, predicted = outputs["predictive_entropy"].float(), outputs.probabilities.argmax(1)
    return ClassificationSet(name, Role.MADE_UP, outputs["ood_score"].float(), entropies, predicted, none)


def pictures_of(data: ImageDataset, scored: ScoredImages) -> tuple[Picture, ...]:
    """Return the most unusual, most ambiguous and most typical images of the first :data:`CLASSES` classes."""
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


def thumbnail(data: ImageDataset, index: int) -> UInt8[Tensor, "channels height width"]:
    """Shrink an image, as the network sees it, to at most :data:`SIDE` pixels in each direction."""
    image = torch.from_numpy(data.image(index))
    longest = max(image.shape[1:])
    if longest <= SIDE:
        return image
    size = [max(1, round(side * SIDE / longest)) for side in image.shape[1:]]
    smaller = functional.interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]
    return smaller.round().clamp(0, 255).to(torch.uint8)


def _first(order: Tensor, chosen: Tensor) -> list[int]:
    """Return the positions of the :data:`EACH` smallest values of ``order`` among the chosen."""
    positions = chosen.nonzero().flatten()
    kept: list[int] = positions[order[positions].argsort(stable=True)[:EACH]].tolist()
    return kept
