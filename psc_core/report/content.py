"""What a report shows beyond the bundle itself: scores of some images, a few pictures, the sizes that were compared.

A fit keeps it beside the bundle, in one safetensors file, so that the page can be drawn again without the images.
The file is shown, never computed with, and no reader of a bundle needs it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from jaxtyping import Bool, Float, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from psc_core.bundle.io import write_file
from psc_core.errors import BundleError

FILE: Final = "report.safetensors"
_METADATA: Final = "report"
_BY_NAME: Final = ("confidence", "correct", "groups")
"""Fields of a set that hold a tensor for each name."""


class Role(StrEnum):
    """What a set of images is in a report."""

    TRAINING = "training images"
    VALIDATION = "validation images"
    TEST = "test images"
    MADE_UP = "made-up images"
    OOD = "out-of-distribution images"

    @property
    def is_known(self) -> bool:
        """Whether the images are like those that the model was fitted on."""
        return self in (Role.TRAINING, Role.VALIDATION, Role.TEST)


@dataclass(frozen=True)
class ScoredSet:
    """What reports of either kind of model show of n images that belong together, on the CPU."""

    name: str
    role: Role
    ood_score: Float[Tensor, " n"]  # nats
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict, kw_only=True)  # by predictor and metric
    groups: Mapping[str, Int[Tensor, " _"]] = field(default_factory=dict, kw_only=True)  # positions of parts, by name


@dataclass(frozen=True)
class ImageSet(ScoredSet):
    """Scores of a classifier for n images."""

    entropy: Float[Tensor, " n"]  # predictive entropy, nats
    predicted: Int[Tensor, " n"]  # class index
    labels: Int[Tensor, " m"]  # first label of each image; empty for images of other classes
    confidence: Mapping[str, Float[Tensor, " examples"]] = field(default_factory=dict)  # by classifier
    correct: Mapping[str, Bool[Tensor, " examples"]] = field(default_factory=dict)  # by classifier


@dataclass(frozen=True)
class ValueSet(ScoredSet):
    """Numbers that a regression predicts for n images, in the target's unit."""

    mean: Float[Tensor, " n"]
    deviation: Float[Tensor, " n"]  # predicted standard deviation
    values: Float[Tensor, " m"]  # the true numbers; empty for images without


@dataclass(frozen=True)
class Picture:
    """One image to look at."""

    why: str  # it is shown: "most unusual", "most ambiguous" or "most typical"
    label: int  # class index
    predicted: int
    ood_score: float
    entropy: float
    pixels: UInt8[Tensor, "channels height width"]


@dataclass(frozen=True)
class Content:
    """What was collected for a report; empty parts are not shown."""

    version: str  # of the bundle
    sets: tuple[ScoredSet, ...] = ()
    pictures: tuple[Picture, ...] = ()
    sizes: Mapping[str, Float[Tensor, "c_max d_max"]] = field(default_factory=dict)  # "nc1" and "nc4" of every size

    def with_sets(self, sets: Iterable[ScoredSet], pictures: tuple[Picture, ...]) -> Content:
        """Further sets, and other pictures where there are any."""
        return replace(self, sets=(*self.sets, *sets), pictures=pictures or self.pictures)

    def save(self, folder: Path) -> None:
        """Write :data:`FILE` into ``folder``."""
        tensors: dict[str, Tensor] = {f"sizes.{name}": values for name, values in self.sizes.items()}
        sets: list[dict[str, Any]] = []
        for number, images in enumerate(self.sets):
            mine: dict[str, Tensor] = {}
            for kind, value in vars(images).items():
                if isinstance(value, Tensor):
                    mine[kind] = value
                elif kind in _BY_NAME:
                    mine |= {f"{kind}.{name}": values for name, values in value.items()}
            tensors |= {f"sets.{number}.{name}": values.contiguous() for name, values in mine.items()}
            sets.append({"name": images.name, "role": images.role.value, "quality": images.quality})
        pictures: list[dict[str, Any]] = []
        for number, picture in enumerate(self.pictures):
            tensors[f"pictures.{number}"] = picture.pixels.contiguous().clone()  # an image may be shown twice
            pictures.append({name: value for name, value in vars(picture).items() if name != "pixels"})
        document = {"version": self.version, "sets": sets, "pictures": pictures}
        write_file(folder / FILE, save(tensors, metadata={_METADATA: json.dumps(document)}))

    @classmethod
    def load(cls, folder: Path) -> Content:
        """Inverse of :meth:`save`.

        Raises:
            BundleError: The file is missing or damaged.
        """
        file = folder / FILE
        if not file.is_file():
            raise BundleError(f"{folder} has no {FILE}; psc-fit writes one unless it is told --no-report")
        try:
            with safe_open(file, "pt") as opened:
                document = json.loads(opened.metadata()[_METADATA])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return cls(
                document["version"],
                tuple(_scored_set(entry, _below(f"sets.{i}.", tensors)) for i, entry in enumerate(document["sets"])),
                tuple(
                    Picture(**entry, pixels=tensors[f"pictures.{i}"]) for i, entry in enumerate(document["pictures"])
                ),
                _below("sizes.", tensors),
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is damaged ({error}); fit the bundle again") from error


def _scored_set(entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoredSet:
    kind = ValueSet if "mean" in tensors else ImageSet
    names = {part.name for part in fields(kind)}
    parts: dict[str, Any] = {name: _below(f"{name}.", tensors) for name in names.intersection(_BY_NAME)}
    parts |= {name: tensor for name, tensor in tensors.items() if name in names}
    return kind(**{**entry, "role": Role(entry["role"])}, **parts)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose name starts with ``prefix``, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
