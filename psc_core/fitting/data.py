"""The images of a fit: checked, labelled and split once, at the entrance; every stage takes them from here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from psc_core.calibration.conformal import check_rates
from psc_core.compute.distributed import Reducer
from psc_core.compute.readable import NONE, SHOWN_IMAGES, check_count, find_unreadable, without
from psc_core.data.cache import cached
from psc_core.data.classes import check_same
from psc_core.data.dataset import ImageDataset, balanced, split_validation
from psc_core.errors import DataError, UsageError
from psc_core.tasks.fit.task import TaskFit, task_fit, task_fit_for
from psc_core.tasks.task import Task


@dataclass(frozen=True)
class FitData:
    """Training images, and validation images in two halves.

    Attributes:
        train: Training images.
        val: All validation images.
        task_fit: How models of what these images are labelled with are fitted.
        seed: Splits the validation images, and draws training images.
        left_out: How many training and validation images were left out, because they cannot be decoded.
        is_split: False where the training images stand for both halves.
    """

    train: ImageDataset
    val: ImageDataset
    task_fit: TaskFit
    seed: int
    left_out: tuple[int, int] = (0, 0)
    is_split: bool = True

    @classmethod
    def of(
        cls,
        train: ImageDataset,
        val: ImageDataset,
        *,
        seed: int = 0,
        task: str | None = None,
        max_images: int | None = None,
    ) -> FitData:
        """Check, label and split images as they were opened.

        Args:
            train: Training images.
            val: Validation images, none of them trained on.
            seed: Splits the validation images, and draws training images.
            task: One of :data:`psc_core.tasks.TASKS`; None for the one of the images' labels.
            max_images: Training images that are used, balanced over classes; None for all.

        Raises:
            UsageError: The images are not labelled with what the task predicts.
            DataError: Classes or numbers that differ between the two, or too few images.
        """
        fit = task_fit_for(train) if task is None else task_fit(task)
        if not fit.takes(train):
            raise UsageError(
                f"{train.name} has {task_fit_for(train).describe_labels(train)}, which a {fit.task_type.noun} does not "
                f"predict; the task of these images is {task_fit_for(train).task_type.name}"
            )
        if train.target != val.target:
            raise DataError(
                f"expected the same target for training and validation, got {train.target} and {val.target}"
            )
        train, val = fit.labelled(train, val)
        return cls(balanced(train, max_images, seed), val, fit, seed).checked()

    @classmethod
    def without_validation(cls, train: ImageDataset, *, seed: int, max_images: int | None) -> FitData:
        """Return training images that stand for the validation images too, for a stage that only selects by them."""
        fit = task_fit_for(train)
        train = balanced(fit.labelled(train, train)[0], max_images, seed)
        return cls(train, train, fit, seed, is_split=False)

    def checked(self) -> FitData:
        """Return these images where a fit can use them.

        Raises:
            DataError: Other classes in one than in the other, too few images, or a half that measures nothing.
        """
        check_classes(self.train, self.val)
        for half in self._halves:
            self.task_fit.check_half(half)
        return self

    @cached_property
    def task(self) -> Task:
        """The task of a model of these images."""
        return self.task_fit.task(self.train)

    @cached_property
    def _halves(self) -> tuple[ImageDataset, ImageDataset]:
        return split_validation(self.val, self.seed) if self.is_split else (self.val, self.val)

    @property
    def selection(self) -> ImageDataset:
        """Validation images that select the layer, the sizes, the prior precision and the temperature."""
        return self._halves[0]

    @property
    def calibration(self) -> ImageDataset:
        """Validation images that only calibrate, so that stated rates hold."""
        return self._halves[1]

    def fewer(self, training_images: int, validation_images: int) -> FitData:
        """Return so many random images, balanced over classes, split as all of them are."""
        train = balanced(self.train, training_images, self.seed)
        return replace(self, train=train, val=balanced(self.val, validation_images, self.seed))

    def cached(self, folder: Path | None, *, processes: int) -> FitData:
        """Return the same images with their pixels kept, see :func:`psc_core.data.cache.cached`."""
        train, val = (cached(data, folder, processes=processes) for data in (self.train, self.val))
        return replace(self, train=train, val=val)

    def readable(self, at_most: int, reducer: Reducer | None = None) -> tuple[FitData, tuple[str, ...]]:
        """Return the images that can be decoded, and what is said of those that cannot, for people.

        Args:
            at_most: How many may be left out; for 0 none are looked for, and the first that is met ends the fit.
            reducer: This process among those that fit one model.

        Raises:
            DataError: More than ``at_most`` cannot be decoded, or too few can.
        """
        if not at_most:
            return self, ()
        train = find_unreadable(self.train, at_most, reducer)
        val = find_unreadable(self.val, at_most - len(train), reducer) if len(train) <= at_most else NONE
        check_count(at_most, train, val)
        count, reasons = len(train) + len(val), (*train.reasons, *val.reasons)[:SHOWN_IMAGES]
        if not count:
            return self, ()
        kept_train, kept_val = without(self.train, train), without(self.val, val)  # They are labelled already.
        of_each = f"{len(train)} of {self.train.name}, {len(val)} of {self.val.name}"
        notes = (*(f"left out: {reason}" for reason in reasons), f"left out {count} that cannot be decoded: {of_each}")
        kept = replace(self, train=kept_train, val=kept_val, left_out=(len(train), len(val)))
        return kept.checked(), notes

    @property
    def is_ambiguous(self) -> bool:
        """True where some image has labels of several classes."""
        return self.train.is_ambiguous or self.val.is_ambiguous

    def check_rates(self, *, alpha: float, coverage: float) -> None:
        """Reject rates that the calibration split is too small for.

        Raises:
            UsageError: ``alpha`` below 1/(n + 1) or ``coverage`` above n/(n + 1).
        """
        try:
            check_rates(len(self.calibration), alpha=alpha, coverage=coverage)
        except UsageError as error:
            raise UsageError(f"{error} (half of the {len(self.val)} validation images calibrate)") from error


def check_classes(train: ImageDataset, val: ImageDataset) -> None:
    """Require the same classes in both, at least two of them, each with at least two training images.

    Raises:
        DataError: They differ or have too few images.
    """
    check_same(val, train.classes, "training images'")
    if len(train.classes) < 2:
        raise DataError(f"expected at least two classes, got {list(train.classes)}; give a folder for each class")
    counts = torch.bincount(train.labels, minlength=len(train.classes))
    if counts.min() < 2:
        rare = train.classes[int(counts.argmin())]
        raise DataError(f"expected at least two training images of each class, got {int(counts.min())} of {rare!r}")
