"""The interface between a fit and the task of its model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from psc_core.collapse import LayerQuality, NearestMean
from psc_core.compute import Compute, passes
from psc_core.data.dataset import ImageDataset
from psc_core.data.open import check_same
from psc_core.errors import DataError, UsageError, listed
from psc_core.names import composed
from psc_core.numerics.features import FeatureMatrix
from psc_core.settings import FitSettings, settings_where
from psc_core.tasks import TASKS, module_of
from psc_core.tasks.calibration import BaseCalibration
from psc_core.tasks.head import Head, Scored
from psc_core.tasks.policy import BasePolicy
from psc_core.tasks.task import Task

FIRST_LOOK_IMAGES: Final = 1000
"""Maximum number of images of each set that :meth:`TaskFit.first_look` is given."""


WRONG_NETWORK: Final = "its weights or the preprocessing are wrong"


class Features(NamedTuple):
    """The features of n labelled examples, ordered by class, on disk."""

    head_input: FeatureMatrix  # z, followed by the other layers that the head reads
    labels: Int[Tensor, " n"]  # class indices, ascending
    images: Int[Tensor, " n"]  # which image of the data set each one shows
    widths: tuple[int, ...]  # columns of z, and of each other layer in head_input
    values: Float[Tensor, " n"] | None = None  # number of each, of a regression, target's unit
    network_output: FeatureMatrix | None = None  # as it was trained, if this may be served


class HeadJob(NamedTuple):
    """The features that a head is fitted to, and the settings of that fit."""

    kind: str
    train: Features
    selection: Features  # on which free parameters are chosen
    classes: tuple[str, ...]  # names
    predictions: str = "psc"  # one of :data:`psc_core.settings.PREDICTIONS`
    seed: int = 0  # of random features, and of what draws and orders training images
    device: torch.device = torch.device("cpu")  # where to fit, and where the head is returned


class Calibrated(NamedTuple):
    """A calibration, the policy that goes with it, and the metrics of the calibration split."""

    calibration: BaseCalibration
    policy: BasePolicy
    metrics: Mapping[str, Any]  # JSON types


class FirstLook(NamedTuple):
    """How good the network is before anything is fitted to it."""

    text: str
    warning: str = ""


class TaskFit:
    """The way in which models of one task are fitted; ``FIT`` in ``fit.task`` of its folder is the only instance.

    Attributes:
        layer_quality: The quality that is measured after every layer besides NC1.
        own_settings: Names of the settings that not every task reads, but this one.
        compares_network_output: Whether a fit compares the network's output with the head's, where settings leave the
            choice.
        why_not_extended: The reason why no more images can extend a density of a fitted model; empty where they can.
    """

    task_type: ClassVar[type[Task]]
    layer_quality: ClassVar[type[LayerQuality]] = NearestMean
    own_settings: ClassVar[tuple[str, ...]] = ()
    compares_network_output: ClassVar[bool] = False
    why_not_extended: ClassVar[str] = ""

    def takes(self, data: ImageDataset) -> bool:
        """Return whether the images are labelled with what the task predicts."""
        raise NotImplementedError

    def labelled(self, train: ImageDataset, val: ImageDataset) -> tuple[ImageDataset, ImageDataset]:
        """Return both, labelled with the classes that collapse, projection, density and gates work on.

        Raises:
            DataError: If they cannot be labelled so, or the two do not belong together.
        """
        return train, val

    def check_half(self, images: ImageDataset) -> None:
        """Raise :class:`DataError` if nothing can be measured on one half of the validation images."""

    def task(self, train: ImageDataset) -> Task:
        """Return the task of a model of these images."""
        return self.task_type()

    def check_same(self, task: Task, classes: Sequence[str], data: ImageDataset) -> None:
        """Require images labelled with what a fitted model of these ``classes`` predicts.

        Raises:
            DataError: If they have other classes, or numbers of another target.
        """
        check_same(data, classes, "model's")

    def describe_labels(self, train: ImageDataset) -> str:
        """Return a phrase that says how the images are labelled."""
        return f"{len(train.classes)} classes"

    def reads(self, setting: str) -> bool:
        """Return whether a fit of this task reads a setting."""
        return setting in self.own_settings or not owners_of(setting)

    def averages_candidate(self, settings: FitSettings) -> bool:
        """Return whether a head reads the candidate's features averaged over positions besides z."""
        return self.reads("head_input") and settings.head_input == "both"

    def check(self, settings: FitSettings, images: int) -> None:
        """Raise :class:`UsageError` for a setting that this task does not read, or that so few images cannot keep.

        Args:
            settings: The settings.
            images: The number of images that calibrate.
        """
        for name in settings_where():
            if not self.reads(name) and getattr(settings, name) != getattr(FitSettings, name):
                owners = " or ".join(f"a {owner.task_type.noun}" for owner in owners_of(name))
                raise UsageError(f"a {self.task_type.noun} does not read {name}, which is for {owners}; leave it out")

    def relabelled(self, task: Task, data: ImageDataset, labels: Sequence[str]) -> ImageDataset:
        """Return images that are labelled as people said, by labels of :meth:`.Task.parse_label`.

        Raises:
            DataError: If the model cannot predict one of them.
        """
        position, labels = {label: index for index, label in enumerate(data.classes)}, [*map(composed, labels)]
        if odd := sorted({*labels} - {*position}):
            raise DataError(
                f"labels of {data.name} are no classes of the model: {listed(odd, 10)}; review these images again, or "
                "calibrate a bundle that has these classes"
            )
        return replace(data, labels=torch.tensor([position[label] for label in labels]))

    def confidence_gate(self, *, ambiguous: bool) -> tuple[bool, str]:
        """Return whether a gate reads the energy, and why, a sentence; ``ambiguous`` where images have many labels."""
        if ambiguous:
            reason = "some images have several labels, so confidence is no gate and no images are mixed"
            return False, reason
        return True, "no image has several labels, so confidence is a gate"

    def fit_head(self, job: HeadJob) -> Head:
        """Return a fitted head, on the job's device.

        Raises:
            FitError: If features cannot be fitted.
        """
        raise NotImplementedError

    def has_temperature(self, head: Head) -> bool:
        """Return whether :meth:`temper` may change the head."""
        return False

    def temper(self, head: Head, scored: Scored, images: ImageDataset) -> Head:
        """Return the head with its temperature chosen again, or the head itself.

        Args:
            head: Head of a fitted model.
            scored: Its scores of the images, on the CPU.
            images: Images that do not calibrate.
        """
        return head

    def calibrate(
        self,
        scored: Scored,
        ood_score: Float[Tensor, " n"],
        images: ImageDataset,
        settings: FitSettings,
        weights: Float[Tensor, " n"] | None = None,
        *,
        or_higher: bool = False,
    ) -> Calibrated:
        """Return the calibration on n images of the calibration split, as the served pipeline scored them.

        Args:
            scored: Scores of the images.
            ood_score: OOD scores of the images, nats.
            images: Labelled images.
            settings: The rates.
            weights: How many images each one stands for; None where all are equal.
            or_higher: Whether a higher risk may take the place of the one in the settings that cannot be shown.

        Raises:
            UsageError: If the images cannot show the risk in the settings.
            FitError: If scores are not finite.
        """
        raise NotImplementedError

    def first_look(self, net: nn.Module, train: ImageDataset, val: ImageDataset, compute: Compute) -> FirstLook:
        """Say how good the plain network, on the device, is on at most :data:`FIRST_LOOK_IMAGES` of each set.

        A person can compare it with what is known of the network: images that are resized, cropped or standardised
        otherwise than in training make it worse, and nothing else shows that.
        """
        raise NotImplementedError


def run_network(
    net: Callable[[Tensor], Tensor], data: ImageDataset, compute: Compute
) -> Float[Tensor, "images outputs"]:
    """Return the plain network's outputs for every image, in the precision of ``compute``, as float32 on the CPU."""
    outputs = passes(data, compute, f"the network on {data.name}", net)
    return torch.cat([output.float().cpu() for output, _ in outputs])


def task_fit(name: str) -> TaskFit:
    """Return how models of a task are fitted; raises :class:`UsageError` for one that is not in ``TASKS``."""
    if name not in TASKS:
        raise UsageError(f"expected a task of {', '.join(TASKS)}, got {name!r}")
    found: TaskFit = module_of(name, "psc_core.tasks.{}.fit.task").FIT
    return found


def owners_of(setting: str) -> list[TaskFit]:
    """Return the tasks that alone read a setting; none if every task does."""
    return [fit for fit in map(task_fit, TASKS) if setting in fit.own_settings]


def task_fit_for(data: ImageDataset) -> TaskFit:
    """Return how a model of these images is fitted, by what they are labelled with."""
    return next(fit for fit in map(task_fit, TASKS) if fit.takes(data))


def one_of(option: str, value: str | None, allowed: Sequence[str], noun: str) -> str:
    """Return a value that is one of those allowed; raises :class:`UsageError`."""
    if value is None or value not in allowed:
        raise UsageError(f"expected {option} of a {noun} to be one of {', '.join(allowed)}, got {value!r}")
    return value
