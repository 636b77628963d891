"""The settings that detectors are compared in: a network, its data, and out-of-distribution data.

Each setting has a *validation* pair (validation images against out-of-distribution images of the training split)
and a *test* pair (test images against test images).  Variants are selected on validation pairs of other settings
(:mod:`.choice`) and reported on test pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Job, Trained
from benchmarks.data import KNOWN_CLASSES, random_images
from benchmarks.paper import common
from benchmarks.runs import Run
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.data.spec import open_dataset


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        name: Of the setting.
        network: The paper's name of the network, see :mod:`benchmarks.paper.common`.
        data: In-distribution data.
        outside: Out-of-distribution data by name.
    """

    name: str
    network: str
    data: str
    outside: Mapping[str, str]

    def job(self, run: Run) -> Job:
        """The job that trains the network, shared with the paper's tables where it is the same."""
        return common.job(run, self.network, self.data)


def _held_out(source: str, network: str, number: int) -> Setting:
    factory = f"benchmarks.data:{source}_%s_{number}"
    return Setting(f"{source}-held-out-{number}", network, factory % "known", {"other classes": factory % "unknown"})


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("dirty-mnist", "resnet18", "dirty-mnist", {"fashion-mnist": "fashion-mnist"}),
        Setting("cifar10", "wide_resnet28_10", "cifar10", {"fashion-mnist": "fashion-mnist", "mnist": "mnist"}),
        *(_held_out("cifar10", "held_out", number) for number in range(len(KNOWN_CLASSES))),
        *(_held_out("mnist", "held_out", number) for number in range(2)),
    )
}

AT_SCALE: Mapping[str, Sequence[str]] = {
    "smoke": ("dirty-mnist", "cifar10-held-out-0"),
    "cpu": tuple(SETTINGS),
    "full": tuple(SETTINGS),
}
"""Settings by scale."""

GRANULARITIES: Mapping[str, Sequence[str]] = {
    "smoke": ("operations", "blocks"),
    "cpu": ("operations", "blocks"),
    "full": ("operations", "blocks", "all"),
}
"""Granularities of PSC's candidate layers by scale."""


@dataclass(frozen=True)
class Pair:
    """In-distribution images and out-of-distribution images by name."""

    inside: ImageDataset
    outside: Mapping[str, ImageDataset]


def pairs(run: Run, setting: Setting, trained: Trained, limit: int | None) -> dict[str, Pair]:
    """The ``"validation"`` and the ``"test"`` pair, with at most ``limit`` images a data set.

    Validation images are those of the calibration split, on which neither layers nor sizes were selected.
    """

    def outside(split: str) -> dict[str, ImageDataset]:
        opened = {
            name: open_dataset(run.spec(spec), split=split, preprocess=trained.train.preprocess)
            for name, spec in setting.outside.items()
        }
        return {name: random_images(data, limit, run.seed) for name, data in opened.items()}

    calibration = split_validation(trained.val, run.seed)[1]
    return {
        "validation": Pair(random_images(calibration, limit, run.seed), outside("val")),
        "test": Pair(random_images(trained.test, limit, run.seed), outside("test")),
    }
