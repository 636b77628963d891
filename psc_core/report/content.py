"""The content of a report beyond the bundle itself: scores of some images, a few pictures, the sizes compared.

A fit stores it beside the bundle, in one safetensors file, so that the page can be drawn again without the images.
Nothing is computed from this file, and no reader of a bundle needs it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar

from jaxtyping import Float, Int, UInt8
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from psc_core.bundle import write_file
from psc_core.data.dataset import ImageDataset
from psc_core.errors import BundleError
from psc_core.model import FittedModel
from psc_core.report.words import Texts
from psc_core.tasks.base import Task

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from psc_core.report.facts import Facts

FILE: Final = "report.safetensors"
_METADATA: Final = "report"


class Role(StrEnum):
    """The role of a set of images in a report."""

    TRAINING = "training images"
    VALIDATION = "validation images"
    TEST = "test images"
    SYNTHETIC = "synthetic OOD images"
    OOD = "out-of-distribution images"

    @property
    def is_known(self) -> bool:
        """True if the images are in distribution."""
        return self in (Role.TRAINING, Role.VALIDATION, Role.TEST)


@dataclass(frozen=True)
class ScoredSet:
    """The scores of n images that belong together, on the CPU; each task adds fields."""

    name: str
    role: Role
    ood_score: Float[Tensor, " n"]  # nats
    quality: Mapping[str, Mapping[str, float]] = field(default_factory=dict, kw_only=True)  # by predictor and metric
    groups: Mapping[str, Int[Tensor, " _"]] = field(default_factory=dict, kw_only=True)  # positions of subsets, by name


@dataclass(frozen=True)
class Picture:
    """One image to show."""

    why: str  # "most unusual", "most ambiguous" or "most typical"
    label: int  # class index
    predicted: int
    ood_score: float
    entropy: float
    pixels: UInt8[Tensor, "channels height width"]


@dataclass(frozen=True)
class Content:
    """Everything that was collected for a report; empty parts are not shown."""

    version: str  # of the bundle
    sets: tuple[ScoredSet, ...] = ()
    pictures: tuple[Picture, ...] = ()
    sizes: Mapping[str, Float[Tensor, "c_max d_max"]] = field(default_factory=dict)  # "nc1" and "nc4" for every size

    def extended_by(self, later: Content) -> Content:
        """Return the sets of both contents, and the pictures of ``later`` if it has any."""
        return replace(self, sets=(*self.sets, *later.sets), pictures=later.pictures or self.pictures)

    def save(self, folder: Path) -> None:
        """Write :data:`FILE` into ``folder``."""
        tensors: dict[str, Tensor] = {f"sizes.{name}": values for name, values in self.sizes.items()}
        sets: list[dict[str, Any]] = []
        for number, images in enumerate(self.sets):
            about = {"name": images.name, "role": images.role.value, "quality": images.quality}
            parts: dict[str, Tensor] = {}
            for part, value in vars(images).items():
                if isinstance(value, Tensor):
                    parts[part] = value
                elif part not in about:
                    parts |= {f"{part}.{name}": values for name, values in value.items()}
            tensors |= {f"sets.{number}.{name}": values.contiguous() for name, values in parts.items()}
            sets.append(about)
        pictures: list[dict[str, Any]] = []
        for number, picture in enumerate(self.pictures):
            tensors[f"pictures.{number}"] = picture.pixels.contiguous().clone()  # an image may be shown twice
            pictures.append({name: value for name, value in vars(picture).items() if name != "pixels"})
        document = {"version": self.version, "sets": sets, "pictures": pictures}
        write_file(folder / FILE, save(tensors, metadata={_METADATA: json.dumps(document)}))

    @classmethod
    def load(cls, folder: Path, task: type[Task]) -> Content:
        """Read a saved content, for the bundle of a model of ``task``."""
        file = folder / FILE
        if not file.is_file():
            raise BundleError(f"{folder} has no {FILE}; psc-fit writes one unless it is told --no-report")
        set_type = task.report().set_type
        try:
            with safe_open(file, "pt") as opened:
                document = json.loads(opened.metadata()[_METADATA])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (not a mapping)
            return cls(
                document["version"],
                tuple(
                    _scored_set(set_type, entry, _below(f"sets.{i}.", tensors))
                    for i, entry in enumerate(document["sets"])
                ),
                tuple(
                    Picture(**entry, pixels=tensors[f"pictures.{i}"]) for i, entry in enumerate(document["pictures"])
                ),
                _below("sizes.", tensors),
            )
        except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
            raise BundleError(f"{file} is damaged ({error}); fit the bundle again") from error


def _scored_set(set_type: type[ScoredSet], entry: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> ScoredSet:
    parts: dict[str, Any] = {part.name: tensors[part.name] for part in fields(set_type) if part.name in tensors}
    for part in fields(set_type):
        if by_name := _below(f"{part.name}.", tensors):
            parts[part.name] = by_name
    return set_type(**{**entry, "role": Role(entry["role"])}, **parts)


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors whose name starts with ``prefix``, by the rest of their name."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def parts_of(data: ImageDataset) -> Mapping[str, Tensor]:
    """Return the groups of a data set; none if it has only one."""
    return data.groups if len(data.groups) > 1 else {}


AnyModel = TypeVar("AnyModel", bound=FittedModel)
AnyScored = TypeVar("AnyScored")


class TaskReport(ABC, Generic[AnyModel, AnyScored]):
    """What the report of a model of one task says and shows beyond that of all; :meth:`.Task.report` returns it."""

    set_type: ClassVar[type[ScoredSet]]
    templates: ClassVar[str]  # first part of their names
    texts: ClassVar[Texts]  # the title and explanation of each figure, in the order of the page
    no_limit: ClassVar[Mapping[str, str]]  # what to say of a figure whose limit does not exist
    columns: ClassVar[Mapping[str, str]]  # titles of the metrics that are shown
    digits: ClassVar[str] = ".4g"  # of a metric
    recorded: ClassVar[Mapping[str, str]] = {}  # metrics shown without images, by their names in the manifest
    glossary: ClassVar[Mapping[str, str]]  # the words that the page explains
    test_images: ClassVar[str] = "images/test"  # in example commands

    @abstractmethod
    def scored_set(self, name: str, role: Role, data: ImageDataset, scored: AnyScored) -> ScoredSet:
        """Return the data that reports keep of the scores of ``data``."""

    @abstractmethod
    def synthetic_set(self, name: str, model: AnyModel, packed: Float[Tensor, "n columns"]) -> ScoredSet:
        """Return the data that reports keep of the packed outputs for synthetic OOD images."""

    def pictures_of(self, data: ImageDataset, scored: AnyScored) -> tuple[Picture, ...]:
        """Return the images to show; none by default."""
        return ()

    @abstractmethod
    def limits_of(self, policy: Any, calibration: Any, metrics: Mapping[str, Any]) -> dict[str, float | None]:
        """Return the limits of decisions by the figure that shows them; None if no image is beyond."""

    @abstractmethod
    def policy_lines(self, task: Any, policy: Any, limits: Mapping[str, float | None]) -> list[str]:
        """Return the meaning of the policy besides the alarm, one line each."""

    def warnings_of(self, metrics: Mapping[str, Any], head: Mapping[str, float]) -> list[str]:
        """Return the warnings that follow from the metrics and the head's record in the manifest."""
        return []

    def accuracy_lost(self, base: Mapping[str, float], psc: Mapping[str, float]) -> str:
        """Return how much less accurate predictions with PSC are than the network; empty if it hardly matters."""
        return ""

    @abstractmethod
    def draw(self, facts: Facts) -> Mapping[str, Figure | None]:
        """Draw the figures of the task by name; None where there is no data for one."""
