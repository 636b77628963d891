"""The settings that detectors are compared in: a network, its data, and out-of-distribution data.

Nothing is chosen or tuned on these out-of-distribution images, so they are all test images.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.checkpoints import Trained, images_to_test
from benchmarks.data import KNOWN_CLASSES
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
    """

    name: str
    data: str
    outside: Mapping[str, str]


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


def test_images(run: Run, setting: Setting, trained: Trained) -> dict[str, ImageDataset]:
    """Out-of-distribution test images of a setting by name, as many of each as the scale uses."""
    return {
        name: images_to_test(run, open_dataset(run.spec(spec), split="test", preprocess=trained.preprocess))
        for name, spec in setting.outside.items()
    }
