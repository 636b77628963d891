"""Check, label and split the images of a fit, once; every stage takes them from the resulting :class:`FitData`.

Training images fit.  The validation images are split into two halves at random: the selection split chooses layer,
sizes and whatever else is free, the calibration split only calibrates, so that the stated rates hold.

A :class:`Checkpoint` keeps the finished stages in a folder beside the bundle, so that an interrupted fit goes on from
there.  The stages are the collapse report (``collapse.json``) and the projection (``fitted_projection.safetensors``).
Only the same job uses them again: its data, weights, version, preprocessing, type of device and the settings that these
stages read are compared by digest (``job.txt``)."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor, nn

from psc_core.bundle import write_files
from psc_core.collapse import CollapseReport
from psc_core.compute import Compute
from psc_core.conformal import check_rates
from psc_core.data.cache import Scratch, cache_images, readable, unused_levels
from psc_core.data.dataset import ImageDataset, draw, draw_balanced, split_validation
from psc_core.data.loaders import temporary_folder
from psc_core.data.open import check_same
from psc_core.errors import DataError, UsageError
from psc_core.network.cut import fused_network, trial_input
from psc_core.projection import FittedProjection, Projection, ProjectionReport
from psc_core.settings import FitSettings
from psc_core.stored_images import check_count
from psc_core.tasks import task_named, task_of_images
from psc_core.tasks.base import FIRST_EVALUATION_IMAGES, FirstEvaluation, Task


@dataclass(frozen=True)
class FitData:
    """The training images, and the validation images in two halves."""

    train: ImageDataset
    val: ImageDataset  # of both halves
    task_type: type[Task]  # what a model of these images predicts
    seed: int  # splits the validation images and draws training images
    skipped: tuple[int, int] = (0, 0)  # training and validation images that cannot be decoded
    is_split: bool = True  # False where the training images stand in for both halves

    @classmethod
    def of(
        cls,
        train: ImageDataset,
        val: ImageDataset | None,  # None: the training images stand in, for a stage that only chooses by them
        *,
        seed: int = 0,
        task: str | None = None,  # one of :data:`psc_core.tasks.TASKS`; None for the one that suits the labels
        max_images: int | None = None,  # number of training images to use, balanced over classes; None for all
    ) -> FitData:
        """Return images as they were opened, checked, labelled and split."""
        found = task_of_images(train) if task is None else task_named(task)
        if not found.takes(train):
            suits = task_of_images(train)
            raise UsageError(
                f"{train.name} has {suits.describe_labels(train)}, which a {found.noun} does not predict; the task of "
                f"these images is {suits.name}, --task {suits.name}: folders give classes, and tables too where they "
                "hold names, or class indices that are opened with --task classification"
            )
        if val is not None and train.target != val.target:
            raise DataError(
                f"expected the same target for training and validation, got {train.target} and {val.target}"
            )
        train, labelled_val = found.labelled(train, train if val is None else val)
        few = draw_few(replace(train, given=torch.arange(len(train))), max_images, seed)
        return cls(few, few if val is None else labelled_val, found, seed, is_split=val is not None).checked()

    def checked(self) -> FitData:
        """Return the same images, after checking that a fit can use them."""
        train, val = self.train, self.val
        if different := train.preprocess.differences(val.preprocess):  # The model takes that of the training images.
            raise UsageError(
                f"expected {val.name} to be read through the training images' preprocessing {train.preprocess}, got "
                f"{val.preprocess}, with another {', '.join(different)}; open both with the same preprocess"
            )
        check_same(val, train.classes, "training images'")
        if len(train.classes) < 2:
            raise DataError(f"expected at least two classes, got {list(train.classes)}; give a folder for each class")
        counts = torch.bincount(train.labels, minlength=len(train.classes))
        if counts.min() < 2:
            rare = train.classes[int(counts.argmin())]
            raise DataError(
                f"expected at least two training images of each class, got {int(counts.min())} of {rare!r}; add images "
                "of it"
            )
        for half in self._halves:
            self.task_type.check_half(half)
        return self

    @cached_property
    def task(self) -> Task:
        """The task of a model that is fitted to these images."""
        return self.task_type.of_images(self.train)

    @cached_property
    def _halves(self) -> tuple[ImageDataset, ImageDataset]:
        return split_validation(self.val, self.seed) if self.is_split else (self.val, self.val)

    @property
    def selection(self) -> ImageDataset:
        """The half of the validation images that chooses layer, sizes, prior precision and temperature."""
        return self._halves[0]

    @property
    def calibration(self) -> ImageDataset:
        """The half of the validation images that only calibrates, so that the stated rates hold."""
        return self._halves[1]

    def fewer(self, training_images: int, validation_images: int) -> FitData:
        """Return this many random images, balanced over classes, and split in the same way."""
        train = draw_balanced(self.train, training_images, self.seed)
        return replace(self, train=train, val=draw_balanced(self.val, validation_images, self.seed))

    def cached(self, cache: Scratch | None) -> tuple[FitData, tuple[str, ...]]:
        """Return the same images with their pixels kept in ``cache``, and a line of text if it has no room for all."""
        if cache is None:
            return self, ()
        train, val = self.train, self.val
        if cache.has_room(train, val):
            train, val = cache_images(train, cache.folder), cache_images(val, cache.folder)
        return replace(self, train=train, val=val), cache.notes(train, val)

    def readable(self, at_most: int, compute: Compute | None = None) -> tuple[FitData, tuple[str, ...]]:
        """Return the images that can be decoded, and lines of text about the others; with 0 none are searched for."""
        (train, val), notes = readable((self.train, self.val), at_most, compute)  # They are labelled already.
        if not notes:
            return self, ()
        skipped = len(self.train) - len(train), len(self.val) - len(val)
        return replace(self, train=train, val=val, skipped=skipped).checked(), notes

    @property
    def is_ambiguous(self) -> bool:
        """Whether some image has labels of several classes."""
        return self.train.is_ambiguous or self.val.is_ambiguous

    def check_rates(self, *, alpha: float, coverage: float) -> None:
        """Require a calibration split that is large enough for the rates."""
        try:
            check_rates(len(self.calibration), alpha=alpha, coverage=coverage)
        except UsageError as error:
            raise UsageError(f"{error} (half of the {len(self.val)} validation images calibrate)") from error


def draw_few(train: ImageDataset, max_images: int | None, seed: int) -> ImageDataset:
    """Return at most ``max_images`` training images, balanced over classes, of which each needs two."""
    fewest = 2 * len(train.classes)
    if max_images is not None and max_images < min(fewest, len(train)):
        raise UsageError(f"expected --max-images of at least {fewest}, two for each class or bin, got {max_images}")
    return draw_balanced(train, max_images, seed)


def say_nothing(text: str, details: str = "") -> None:
    """Tell nobody."""


@dataclass(frozen=True)
class FitJob:
    """A fit of a network: its images, settings and device."""

    data: FitData
    settings: FitSettings  # of a whole fit as :func:`check_settings` returns them
    compute: Compute  # device, precision, batch size, processes
    name: str = "psc"  # of the model
    provenance: Mapping[str, Any] = field(default_factory=dict)  # recorded in the bundle, JSON types
    cache: Scratch | None = None  # for decoded images; None: each pass decodes them
    scratch: Scratch = field(default_factory=Scratch)  # for features
    say: Callable[..., None] = say_nothing  # gets what each stage found: in short, and where it is asked for, more

    @classmethod
    def of(cls, train: ImageDataset, val: ImageDataset, settings: FitSettings, *, task: str | None = None) -> FitJob:
        """Return the job of fitting a model to these images, by this process alone, after checking it."""
        data = FitData.of(train, val, seed=settings.seed, task=task, max_images=settings.max_images)
        settings = check_settings(settings, data)
        return cls(data, settings, settings.compute())

    def first_evaluation(self, net: nn.Module, max_bad_images: int = 0) -> FirstEvaluation:
        """Return how good the original network, on the device, is on a few random images."""
        train, val = (
            readable([draw(images, FIRST_EVALUATION_IMAGES, self.data.seed)], max_bad_images)[0][0]
            for images in (self.data.train, self.data.val)
        )
        run: Callable[[Tensor], Tensor] = net
        if len(train) + len(val) >= FIRST_EVALUATION_IMAGES:  # Tracing takes as long as a few hundred images.
            trial = trial_input(train.preprocess).to(self.compute.device)
            run = fused_network(net, trial, self.compute.precision)
        found = self.data.task_type.first_evaluation(run, train, val, self.compute)
        return found._replace(warning="; ".join(filter(None, [unused_levels(train), found.warning])))

    def decode(self, max_bad_images: int) -> tuple[FitJob, tuple[str, ...]]:
        """Return the job with its images decoded once, without those that cannot be, and lines of text about these."""
        data, not_kept = self.data.cached(self.cache)
        data, skipped = data.readable(max_bad_images, self.compute)
        if skipped:
            data.check_rates(alpha=self.settings.alpha, coverage=self.settings.coverage)
        return replace(self, data=data), (*not_kept, *skipped)


def check_settings(settings: FitSettings, data: FitData) -> FitSettings:
    """Return the settings with the task of the images and, where no head is named, the task's first."""
    temporary_folder()  # Before hours are spent on what is to be kept there.
    task = data.task_type
    settings = settings.of_task(task.name, task.heads)
    if settings.head not in task.heads:
        raise UsageError(f"expected head of a {task.noun} to be one of {', '.join(task.heads)}, got {settings.head!r}")
    task.check(settings, len(data.calibration))
    data.check_rates(alpha=settings.alpha, coverage=settings.coverage)
    if settings.stored_images is not None:
        check_count(settings.stored_images, len(data.train.classes))
    return settings


AnyStage = TypeVar("AnyStage")
_STAMP: Final = "job.txt"


class Checkpoint:
    """The results of finished stages; of several processes the first writes them."""

    def __init__(self, folder: Path, job: Mapping[str, Any], compute: Compute | None = None) -> None:
        """Open the checkpoint of ``job`` (JSON types) in ``folder``, which may hold stages of another job."""
        self.folder = folder
        self.key = hashlib.sha256(json.dumps(job, sort_keys=True).encode()).hexdigest()
        self.compute = compute or Compute(torch.device("cpu"))

    @property
    def is_resumed(self) -> bool:
        """Whether an interrupted run of this job left the folder."""
        stamp = self.folder / _STAMP
        return stamp.exists() and stamp.read_text() == self.key

    def load_collapse(self) -> CollapseReport | None:
        """Return the collapse report, or None where it is not finished."""
        file = self.folder / "collapse.json"
        report = CollapseReport.from_json(json.loads(file.read_text())) if file.exists() else None
        return agree(report, self.compute)

    def save_collapse(self, report: CollapseReport) -> None:
        """Keep a finished report."""
        self._write("collapse.json", json.dumps(report.to_json()).encode())

    def load_projection(self) -> FittedProjection | None:
        """Return the projection, or None where it is not finished."""
        file = self.folder / "fitted_projection.safetensors"
        projection = None
        if file.exists():
            with safe_open(file, "pt") as kept:
                config, report, layers = (json.loads(kept.metadata()[key]) for key in ("config", "report", "layers"))
                tensors = {name: kept.get_tensor(name) for name in kept.keys()}  # noqa: SIM118 - not a mapping
            report |= {"nc1": tensors.pop("nc1"), "nc4": tensors.pop("nc4")}
            report["positions"] = tuple(map(tuple, report["positions"]))
            projection = FittedProjection(
                Projection.restore(config, tensors), ProjectionReport(**report), tuple(layers)
            )
        return agree(projection, self.compute)

    def save_projection(self, fitted: FittedProjection) -> None:
        """Keep a finished projection in one file: its tensors, and the rest as JSON in the metadata."""
        report = asdict(fitted.report)
        tensors = {**fitted.projection.state_dict(), "nc1": report.pop("nc1"), "nc4": report.pop("nc4")}
        kept = {"config": fitted.projection.config(), "report": report, "layers": fitted.layers}
        metadata = {key: json.dumps(value) for key, value in kept.items()}
        data = save({name: part.contiguous() for name, part in tensors.items()}, metadata)
        self._write("fitted_projection.safetensors", data)

    def _write(self, name: str, data: bytes) -> None:
        if self.compute.rank == 0:
            write_files(self.folder, {_STAMP: self.key.encode(), name: data})

    def clear(self) -> None:
        """Remove everything kept."""
        shutil.rmtree(self.folder, ignore_errors=True)


def agree(stage: AnyStage | None, compute: Compute) -> AnyStage | None:
    """Return ``stage`` where every process has it, else None in all: files may be on the disk of one machine only."""
    have = compute.sum_(torch.tensor([float(stage is not None)]))
    return stage if int(have) == compute.world else None
