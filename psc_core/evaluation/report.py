"""What an evaluation found, as values; :mod:`.summary` and :mod:`.tables` show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from psc_core.metrics.intervals import CountInterval, RateInterval
from psc_core.metrics.ranking import Difference

PRIMARY: Final = "psc"
"""The score that the service decides by, and the classifier that it serves; others are compared with it."""

ENTROPY: Final = f"{PRIMARY}-entropy"
"""The score that the service calls an image ambiguous by."""

EPISTEMIC: Final = f"{PRIMARY}-epistemic"
"""The epistemic uncertainty of the head."""

FIELDS: Final = {ENTROPY: "predictive_entropy", EPISTEMIC: "epistemic"}
"""Scores beside the primary one that every answer of the service holds, and the name of their field."""

DECISION: Final = f"{PRIMARY}-decision"
"""Both of them, as :mod:`.selective` makes one score of them."""


@dataclass(frozen=True)
class Separation:
    """How well one score tells OOD images from in-distribution ones; OOD is positive."""

    auroc: float
    aupr_in: float  # average precision, in-distribution positive
    aupr_out: float  # average precision, OOD positive
    fpr95: float  # in-distribution images rejected when 95 % of the OOD images are
    auroc_difference: Difference  # AUROC of the primary score minus this one's, with its standard error
    threshold: float  # above which the fraction α of the in-distribution images is


@dataclass(frozen=True)
class Acceptance:
    """What is accepted by thresholds on one score, where to accept an OOD image or a wrong class is an error."""

    ood_accepted: float  # fraction of OOD images accepted where 95 % of the in-distribution ones are
    aurc: float  # area under risk over coverage, of both kinds of images together


@dataclass(frozen=True)
class ObservedRate:
    """A nominal rate and the one observed on test images."""

    promised: float  # the nominal rate, under its name in JSON
    count: int  # of the images to which it happened
    images: int  # that were tested
    level: float  # probability of the three intervals
    interval: RateInterval  # rates that explain the count (Clopper–Pearson)
    acceptance: CountInterval  # counts that the nominal rate explains (binomial)
    calibrated_acceptance: CountInterval  # and after calibration on so few images (beta-binomial)

    @property
    def rate(self) -> float:
        """Observed rate."""
        return self.count / self.images

    @property
    def assessment(self) -> str:
        """``"as promised"``, ``"higher than promised"`` or ``"lower than promised"``, by the beta-binomial interval."""
        low, high = self.calibrated_acceptance
        if low <= self.count <= high:
            return "as promised"
        return "higher than promised" if self.count > high else "lower than promised"


@dataclass(frozen=True)
class EvaluationReport:
    """Everything ``psc-eval`` measures."""

    model: Mapping[str, str]  # name, version and layer of the bundle
    id_name: str  # in-distribution test data
    images: int  # of this data
    examples: int  # labelled ones of this data
    classification: Mapping[str, Mapping[str, float]]  # by classifier and metric, see :mod:`.losses`
    ood_images: Mapping[str, int]  # number of images of each OOD set
    separation: Mapping[str, Mapping[str, Separation]]  # by OOD set and score
    acceptance: Mapping[str, Mapping[str, Acceptance]]  # by OOD set and score
    flagged: Mapping[str, float]  # fraction of each OOD set with p-value ≤ α
    false_alarms: ObservedRate  # in-distribution images with p-value ≤ α
    misses: ObservedRate  # in-distribution images whose (first) label is outside the prediction set
    mean_set_size: float  # mean number of classes in a prediction set
    ambiguity: Mapping[str, float] = field(default_factory=dict)
    """AUROC of predictive entropy, ambiguous against clean images, by classifier; empty without ambiguous images."""
