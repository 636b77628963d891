"""The settings that detectors are compared in: a network, its data, and out-of-distribution data.

All of these out-of-distribution images are test images.  Yet rules of the method were chosen with those of seed 0 of
several settings in view, such as the weight of the check ``content``; those of other seeds had no part in
that (``benchmarks/results/NOTES.md``, "Many classes").

Whether shifted images of the known classes should be flagged depends on the shift: one that costs no accuracy need not
be, one that makes the network guess should be.  So the tables show accuracy and the fraction flagged side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torchvision.transforms.v2 import functional

from benchmarks import checkpoints
from benchmarks.checkpoints import NetworkJob, Trained, images_to_test, job_of
from benchmarks.data import KNOWN_CLASSES
from benchmarks.ood import pretrained
from benchmarks.ood.pretrained import BACKBONES, PretrainedJob
from benchmarks.runs import Run
from benchmarks.strips import known_classes
from benchmarks.train import Job
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset


@dataclass(frozen=True)
class Setting:
    """One comparison, on a small network trained from scratch."""

    name: str
    data: str  # The in-distribution data.
    outside: Mapping[str, str]  # The out-of-distribution data by name.
    network: str = "small"  # One of the scale's networks.
    longer: int = 1  # How many times the scale's epochs it is trained.
    schedule: str = ""  # The schedule of its training; the scale's by default.
    fit_images: int | None = None  # The number of images to fit on, in place of the scale's.
    record: str = "ood"  # The name of the record that the results belong to.

    def limited(self, run: Run) -> Run:
        """Return the run with as many images as the setting needs or has time for."""
        return replace(run, fit_images=run.fit_images or self.fit_images)

    def job(self, run: Run) -> NetworkJob:
        return self._training(run)

    def obtain(self, run: Run) -> Trained:
        return checkpoints.obtain(run, self._training(run))

    def _training(self, run: Run) -> Job:
        return job_of(run, self.network, self.data, longer=self.longer, schedule=self.schedule)

    def test_images(self, run: Run, trained: Trained) -> dict[str, ImageDataset]:
        """Open out-of-distribution test images by name, as many of each as the scale uses."""
        return {
            name: images_to_test(run, open_dataset(run.spec(spec), split="test", preprocess=trained.preprocess))
            for name, spec in self.outside.items()
        }


@dataclass(frozen=True, kw_only=True)
class PretrainedSetting(Setting):
    """One comparison on a pretrained network, whose other classes are out-of-distribution data too."""

    recipe: PretrainedJob  # The job of seed 0.
    record: str = "ood-pretrained"

    def limited(self, run: Run) -> Run:
        return pretrained.limited(run)

    def job(self, run: Run) -> PretrainedJob:
        return self.recipe.at(run)

    def obtain(self, run: Run) -> Trained:
        return pretrained.obtain(run, self.job(run))

    def test_images(self, run: Run, trained: Trained) -> dict[str, ImageDataset]:
        others = images_to_test(run, self.job(run).others(run))
        return {"other classes": others, **super().test_images(run, trained)}


def _held_out(source: str, number: int, *far: str) -> Setting:
    factory = f"benchmarks.data:{source}_%s_{number}"
    outside = {"other classes": factory % "unknown"} | {data: data for data in far}
    return Setting(f"{source}-held-out-{number}", factory % "known", outside)


_DIGITS = _held_out("mnist", 0, "fashion-mnist", "cifar10")
_CIFAR = _held_out("cifar10", 0, "fashion-mnist", "mnist")


def _pretrained(name: str, recipe: PretrainedJob) -> Setting:
    far = {data: data for data in ("fashion-mnist", "mnist", "cifar10") if data != recipe.data}
    return PretrainedSetting(f"{recipe.backbone.name}-{name}", recipe.data, far, recipe=recipe)


MANY = "ood-many"  # The record of the settings with many classes.


def _many(kind: str, fit_images: int, longer: int) -> Setting:
    data = f"benchmarks.strips:{kind}_%s"
    outside = {"other classes": data % "unknown"} | _far_strips(kind)
    return Setting(f"digit-{kind}", data % "known", outside, "strided", longer, fit_images=fit_images, record=MANY)


def _far_strips(kind: str) -> dict[str, str]:
    return {source: f"benchmarks.strips:{source.partition('-')[0]}_{kind}" for source in ("fashion-mnist", "cifar10")}


_PAIRS = PretrainedJob(80, 50, epochs=0, data="benchmarks.strips:pairs", known=tuple(known_classes(2)[0]))

SETTINGS: Mapping[str, Setting] = {
    setting.name: setting
    for setting in (
        Setting("dirty-mnist", "dirty-mnist", {"fashion-mnist": "fashion-mnist"}),
        Setting("cifar10", "cifar10", {"fashion-mnist": "fashion-mnist", "mnist": "mnist"}),
        *(_held_out("cifar10", number) for number in range(len(KNOWN_CLASSES))),
        _DIGITS,
        _held_out("mnist", 1, "fashion-mnist", "cifar10"),
        replace(_DIGITS, name="vgg16-mnist-held-out-0", network="vgg16"),
        replace(_DIGITS, name="vit-mnist-held-out-0", network="vit", longer=3, schedule="adamw"),
        # So long on so few images that the penultimate layer collapses.
        replace(_CIFAR, name="cifar10-few-0", data="benchmarks.data:cifar10_few_0", longer=25, schedule="ddu"),
        *(
            _pretrained(name, replace(recipe, backbone=backbone))
            for backbone in BACKBONES.values()
            for name, recipe in {
                "frozen-5": PretrainedJob(5, per_class=400, epochs=0),
                "tuned-8": PretrainedJob(8, per_class=1000, epochs=5),
            }.items()
        ),
        _pretrained("frozen-mnist", PretrainedJob(6, 500, epochs=0, data="mnist", known=KNOWN_CLASSES[0])),
        _many("pairs", 10_000, longer=2),
        _many("triples", 20_000, longer=4),
        PretrainedSetting("lite0-frozen-pairs", _PAIRS.data, _far_strips("pairs"), recipe=_PAIRS, record=MANY),
    )
}

AT_SCALE: Mapping[str, Sequence[str]] = {  # The settings by scale; on a CPU two splits by class of each data set.
    "smoke": ("dirty-mnist", "mnist-held-out-0"),
    "cpu": tuple(  # Those with many classes take hours and are named.
        name for name, each in SETTINGS.items() if each.record != MANY and not name.endswith(("-2", "-3", "-4"))
    ),
    "full": tuple(SETTINGS),
}


# -- covariate shift: images of the known classes, with another look --------------------------------------------------

NOISE = 0.1  # The standard deviation of the noise; 1 is from black to white.


def noisy(images: Tensor) -> Tensor:
    """Add Gaussian noise of standard deviation :data:`NOISE`, the same in every run."""
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    return (images + 255 * NOISE * noise).round().clamp(0, 255).to(torch.uint8)


SHIFTS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "rotated by 15°": lambda images: functional.rotate(images, 15, functional.InterpolationMode.BILINEAR),
    "rotated by 45°": lambda images: functional.rotate(images, 45, functional.InterpolationMode.BILINEAR),
    "noise": noisy,
    "blurred": lambda images: functional.gaussian_blur(images, [5, 5], [1.0, 1.0]),
    "half the contrast": lambda images: functional.adjust_contrast(images, 0.5),
}
