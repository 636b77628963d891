"""Networks, epochs and images of each scale.

``full`` is the paper's: its networks, schedule and 350 epochs; ``--epochs`` shortens it.
``cpu`` takes a quarter of the width of the paper's ResNet-18 and VGG-16, which a few cores train in minutes; tables
name the network that was run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks.checkpoints import SPECTRAL_NORM, Job
from benchmarks.data import random_images
from benchmarks.runs import Run
from psc_core.data.dataset import ImageDataset


@dataclass(frozen=True)
class Scale:
    """Configuration of a scale.

    Attributes:
        networks: Network used for each of the paper's, and the ``"small"`` one of the comparison of OOD detectors.
        mnist_epochs: Epochs on digits.
        cifar_epochs: Epochs on CIFAR-10.
        batch: Labelled examples in a training step.
        fit_images: Training images that PSC and the baselines are fitted on; None for all.
        test_images: Test images of each data set; None for all.
        seeds: Seeds of tables with standard errors.
        schedule: Of the learning rate, see :mod:`benchmarks.train`.
    """

    networks: Mapping[str, str]
    mnist_epochs: int
    cifar_epochs: int
    batch: int
    fit_images: int | None
    test_images: int | None
    seeds: tuple[int, ...]
    schedule: str = "one-cycle"


_PAPER = ("resnet18", "resnet50", "vgg16", "wide_resnet28_10")

SCALES: Mapping[str, Scale] = {
    "smoke": Scale(dict.fromkeys((*_PAPER, "small"), "wide_resnet10_1"), 1, 2, 64, 400, 120, (0, 1)),
    "cpu": Scale(
        {**dict.fromkeys((*_PAPER, "small"), "resnet18_narrow"), "vgg16": "vgg16_narrow"},
        2,
        8,
        128,
        10_000,
        None,
        (0, 1, 2),
    ),
    "full": Scale(
        {**{name: name for name in _PAPER}, "small": "resnet18"}, 350, 350, 128, None, None, (0, 1, 2), "ddu"
    ),
}


def scale_of(run: Run) -> Scale:
    """The configuration of a run's scale, with the command line's replacements."""
    scale = SCALES[run.scale]
    return replace(
        scale, fit_images=run.fit_images or scale.fit_images, test_images=run.test_images or scale.test_images
    )


def job(run: Run, network: str, data: str, *, spectral_norm: bool = False, seed: int | None = None) -> Job:
    """The job that trains one of the paper's networks at the run's scale."""
    scale = scale_of(run)
    epochs = run.epochs or (scale.cifar_epochs if "cifar10" in data else scale.mnist_epochs)
    return Job(
        scale.networks[network],
        data,
        epochs,
        run.seed if seed is None else seed,
        SPECTRAL_NORM if spectral_norm else 0.0,
        scale.batch,
        scale.schedule,
    )


def test_images(run: Run, data: ImageDataset) -> ImageDataset:
    """At most as many test images as the scale uses."""
    return random_images(data, scale_of(run).test_images)


def number(value: float | None, digits: int = 3) -> str:
    """A number for a table; a dash for None."""
    return "—" if value is None else f"{value:.{digits}f}"
