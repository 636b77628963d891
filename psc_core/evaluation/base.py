"""The parts of every task's evaluation: the pass through the served path, observed rates, the base of reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from jaxtyping import Bool, Float
from torch import Tensor, nn

from psc_core.compute.device import autocast
from psc_core.images.preprocess import Images, Preprocess
from psc_core.metrics import intervals
from psc_core.metrics.intervals import CountInterval, RateInterval
from psc_core.precision import Precision

PRIMARY: Final = "psc"
"""The score that the service decides by, and the predictor that it serves; others are compared with it."""

LEVEL: Final = 0.99
"""Probability of the intervals around observed rates."""


@dataclass(frozen=True)
class ObservedRate:
    """A nominal rate and the one observed on test images."""

    nominal: float
    count: int  # of the images to which it happened
    images: int  # that were tested
    level: float  # probability of the three intervals
    interval: RateInterval  # rates that explain the count (Clopper–Pearson)
    acceptance: CountInterval  # counts that the nominal rate explains (binomial)
    calibrated_acceptance: CountInterval  # and after calibration on so few images (beta-binomial)

    @property
    def rate(self) -> float:
        """The observed rate."""
        return self.count / self.images

    @property
    def assessment(self) -> str:
        """``"as stated"``, ``"higher than stated"`` or ``"lower than stated"``, by the beta-binomial interval."""
        low, high = self.calibrated_acceptance
        if low <= self.count <= high:
            return "as stated"
        return "higher than stated" if self.count > high else "lower than stated"


def observed_rate(happened: Bool[Tensor, " n"], nominal: float, calibration_images: int) -> ObservedRate:
    """Return the fraction and count of an event, beside its nominal rate."""
    count, images = int(happened.sum()), len(happened)
    return ObservedRate(
        nominal=nominal,
        count=count,
        images=images,
        level=LEVEL,
        interval=intervals.binomial_interval(count, images, level=LEVEL),
        acceptance=intervals.binomial_acceptance(images, nominal, level=LEVEL),
        calibrated_acceptance=intervals.beta_binomial_acceptance(images, nominal, calibration_images, level=LEVEL),
    )


@dataclass(frozen=True)
class Report:
    """Base of the reports: how good a model is on test images."""

    model: Mapping[str, str]  # what identifies it, with at least name, version and layer
    id_name: str  # in-distribution test data
    images: int  # of this data

    def to_text(self) -> str:
        """Return the report for a terminal."""
        raise NotImplementedError

    def to_markdown(self) -> str:
        """Return the report as a Markdown page."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types."""
        raise NotImplementedError


@dataclass(frozen=True)
class OwnNetwork:
    """A network as it was trained, beside which its fitted model is shown.

    It runs in the model's precision: the two then differ by what was fitted, not by how the network was computed.
    """

    net: nn.Module  # on the device, as many outputs as its task predicts from
    preprocess: Preprocess
    precision: Precision

    def outputs(self, images: Images) -> Float[Tensor, "batch outputs"]:
        """Return its outputs, float64."""
        inputs = self.preprocess.standardise(images)
        with autocast(images.device, self.precision):
            output: Tensor = self.net(inputs)
        return output.double()
