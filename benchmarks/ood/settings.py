"""The settings that detectors are compared in: a network, its data, and out-of-distribution data.

Nothing is chosen or tuned on these out-of-distribution images, so they are all test images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Job, Trained
from benchmarks.data import KNOWN_CLASSES, random_images
from benchmarks.paper import common
from benchmarks.runs import Run
from psc_core.data.dataset import ImageDataset
from psc_core.data.spec import open_dataset


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        name: Of the setting.
        data: In-distribution data.
        outside: Out-of-distribution data by name.
        network: The paper's name of the network, or ``"small"``, see :mod:`benchmarks.paper.common`.
    """

    name: str
    data: str
    outside: Mapping[str, str]
    network: str = "small"

    def job(self, run: Run) -> Job:
        """The job that trains the network."""
        return common.job(run, self.network, self.data)


def _held_out(source: str, number: int) -> Setting:
    factory = f"benchmarks.data:{source}_%s_{number}"
    return Setting(f"{source}-held-out-{number}", factory % "known", {"other classes": factory % "unknown"})


SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("dirty-mnist", "dirty-mnist", {"fashion-mnist": "fashion-mnist"}),
        Setting("cifar10", "cifar10", {"fashion-mnist": "fashion-mnist", "mnist": "mnist"}),
        *(_held_out("cifar10", number) for number in range(len(KNOWN_CLASSES))),
        *(_held_out("mnist", number) for number in range(2)),
    )
}

AT_SCALE: Mapping[str, Sequence[str]] = {
    "smoke": ("dirty-mnist", "mnist-held-out-0"),
    "cpu": tuple(name for name in SETTINGS if not name.endswith(("-2", "-3", "-4"))),
    "full": tuple(SETTINGS),
}
"""Settings by scale: on a CPU two splits by class of each data set."""


@dataclass(frozen=True)
class Pair:
    """In-distribution images and out-of-distribution images by name."""

    inside: ImageDataset
    outside: Mapping[str, ImageDataset]


def test_pair(run: Run, setting: Setting, trained: Trained, limit: int | None) -> Pair:
    """Test images of a setting, at most ``limit`` of each data set."""
    outside = {
        name: open_dataset(run.spec(spec), split="test", preprocess=trained.train.preprocess)
        for name, spec in setting.outside.items()
    }
    return Pair(
        random_images(trained.test, limit, run.seed),
        {name: random_images(data, limit, run.seed) for name, data in outside.items()},
    )
