"""Trained networks with their data, shared by all scripts, and each scale's version of the paper's networks.

``full`` has the paper's networks, schedule and 350 epochs, which ``--epochs`` shortens.  ``cpu`` has ResNet-18 and
VGG-16 at a quarter of their width, which a few cores train in minutes; tables name the network that was run.  The file
name of a checkpoint describes network, data and training; the file beside it has the digest of the images, and with
other images it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from torch import nn

from benchmarks.data import random_images
from benchmarks.networks import NETWORKS
from benchmarks.runs import Run
from benchmarks.train import Job, is_trained, train
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import Preprocess
from psc_core.network.weights import load_weights, read_weights

SPECTRAL_NORM = 3.0  # The paper's bound on spectral norms.


@dataclass(frozen=True)
class Scale:
    networks: Mapping[str, str]  # In place of each of the paper's, and those that only `ood` has.
    mnist_epochs: int
    cifar_epochs: int
    batch: int  # The number of labelled examples in a training step.
    fit_images: int | None  # The number of training images that PSC and its peers are fitted on; None for all.
    test_images: int | None  # The number of test images of each data set; None for all.
    seeds: tuple[int, ...]  # Of tables with standard errors.
    schedule: str = "one-cycle"  # Of the learning rate.


_PAPER = ("resnet18", "resnet50", "vgg16", "wide_resnet28_10")
_OWN = {"vit": "vit_narrow", "strided": "resnet18_strided"}
_NARROW = {**dict.fromkeys((*_PAPER, "small"), "resnet18_narrow"), "vgg16": "vgg16_narrow", **_OWN}

SCALES: Mapping[str, Scale] = {
    "smoke": Scale(dict.fromkeys((*_PAPER, "small"), "wide_resnet10_1") | _OWN, 1, 2, 64, 400, 120, (0, 1)),
    "cpu": Scale(_NARROW, 2, 8, 128, 10_000, None, (0, 1, 2)),
    "full": Scale(
        {**{name: name for name in _PAPER}, "small": "resnet18", **_OWN}, 350, 350, 128, None, None, (0, 1, 2), "ddu"
    ),
}


def scale_of(run: Run) -> Scale:
    """Return the configuration of a run's scale, with the command line's replacements."""
    scale = SCALES[run.scale]
    return replace(
        scale, fit_images=run.fit_images or scale.fit_images, test_images=run.test_images or scale.test_images
    )


def images_to_test(run: Run, data: ImageDataset) -> ImageDataset:
    """Return at most as many test images as the scale uses."""
    return random_images(data, scale_of(run).test_images, run.seed)


def job_of(
    run: Run, network: str, data: str, *, spectral_norm: float = 0.0, longer: int = 1, schedule: str = ""
) -> Job:
    """Return the job that trains one of the scale's networks, perhaps for ``longer`` times its epochs."""
    scale = scale_of(run)
    epochs = run.epochs or longer * (scale.cifar_epochs if "cifar10" in data else scale.mnist_epochs)
    return Job(scale.networks[network], data, epochs, run.seed, spectral_norm, scale.batch, schedule or scale.schedule)


class NetworkJob(Protocol):
    """The training of a network, as results name it."""

    @property
    def name(self) -> str:
        """The file name without suffix."""

    @property
    def data(self) -> str:
        """The built-in data set or factory of :mod:`benchmarks.data`."""

    def describe(self) -> str:
        """Return a description for tables."""


@dataclass(frozen=True)
class Trained:
    """A trained network with the data it was trained on."""

    job: NetworkJob
    net: nn.Module  # In evaluation mode, on the run's device.
    train: ImageDataset
    val: ImageDataset
    test: ImageDataset
    fit_on: ImageDataset  # The training images that PSC and its peers are fitted on.
    test_on: ImageDataset  # The test images that they are measured on.

    @property
    def preprocess(self) -> Preprocess:
        return self.train.preprocess


def obtain(run: Run, job: Job) -> Trained:
    """Open the data and load the network, which is trained first if it has no checkpoint."""
    weights = run.checkpoints / f"{job.name}.safetensors"
    preprocess = job.preprocess
    images, val, test = (
        open_dataset(run.spec(job.data), split=split, preprocess=preprocess) for split in ("train", "val", "test")
    )
    if not is_trained(weights, images):
        print(f"training {job.describe()} on {job.data}", flush=True)
        train(job, run.spec(job.data), weights, run.device)
    net = NETWORKS[job.network](len(images.classes), preprocess.channels)
    tensors = read_weights(weights, net.state_dict()).tensors
    load_weights(net, tensors, num_classes=len(images.classes), origin=weights.name)
    fit_on = random_images(images, scale_of(run).fit_images, run.seed)
    return Trained(job, net.eval().to(run.device), images, val, test, fit_on, images_to_test(run, test))
