"""What an evaluation found, as values; :mod:`.summary` and :mod:`.tables` show them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from psc_core.metrics.intervals import CountInterval, RateInterval
from psc_core.metrics.ranking import Difference

PRIMARY: Final = "psc"
"""The score that the service decides by, and the classifier that it serves; others are compared with it."""


@dataclass(frozen=True)
class Classification:
    """Quality of one classifier's probabilities over labelled examples.

    Attributes:
        accuracy: Fraction of the examples whose most probable class is the label.
        nll: Nats.
        brier: In [0, 2].
        ece: 15 equal-width bins.
        adaptive_ece: 15 bins of equal mass.
        aurc: Area under the risk–coverage curve of the confidence.
        augrc: Area under the generalised risk–coverage curve.
        coverage_at_risk_1_percent: Fraction accepted at 1 % errors among the accepted.
        coverage_at_risk_5_percent: The same at 5 %.
    """

    accuracy: float
    nll: float
    brier: float
    ece: float
    adaptive_ece: float
    aurc: float
    augrc: float
    coverage_at_risk_1_percent: float
    coverage_at_risk_5_percent: float


@dataclass(frozen=True)
class Separation:
    """How well one score tells OOD images from in-distribution ones; OOD is positive.

    Attributes:
        auroc: Area under the ROC curve.
        aupr_in: Average precision, in-distribution positive.
        aupr_out: Average precision, OOD positive.
        fpr95: In-distribution images rejected when 95 % of the OOD images are.
        auroc_difference: AUROC of the primary score minus this one's, with its standard error.
    """

    auroc: float
    aupr_in: float
    aupr_out: float
    fpr95: float
    auroc_difference: Difference


@dataclass(frozen=True)
class RealisedRate:
    """A promised rate and the one on test images.

    Attributes:
        promised: The rate that calibration promises.
        count: Number of images to which it happened.
        images: Number of images tested.
        level: Probability of the three intervals.
        interval: Rates that explain ``count`` (Clopper–Pearson).
        acceptance: Counts that the promised rate explains (binomial).
        calibrated_acceptance: Counts that it explains after calibration on this many images (beta-binomial).
    """

    promised: float
    count: int
    images: int
    level: float
    interval: RateInterval
    acceptance: CountInterval
    calibrated_acceptance: CountInterval

    @property
    def rate(self) -> float:
        """Realised rate."""
        return self.count / self.images

    @property
    def assessment(self) -> str:
        """``"as promised"``, ``"higher than promised"`` or ``"lower than promised"``, by the beta-binomial interval."""
        if self.count > self.calibrated_acceptance.high:
            return "higher than promised"
        return "as promised" if self.count in self.calibrated_acceptance else "lower than promised"


@dataclass(frozen=True)
class EvaluationReport:
    """Everything ``psc-eval`` measures.

    Attributes:
        model: Name, version and layer of the bundle.
        id_name: In-distribution test data.
        images: Number of its images.
        examples: Number of its labelled examples.
        classification: By classifier.
        ood_images: Number of images of each OOD set.
        separation: By OOD set and score.
        flagged: Fraction of each OOD set with p-value ≤ α.
        false_alarms: In-distribution images with p-value ≤ α.
        misses: In-distribution images whose (first) label is outside the prediction set.
        mean_set_size: Mean number of classes in a prediction set.
        ambiguity: AUROC of predictive entropy, ambiguous against clean images, by classifier; empty if the data names
            no ambiguous images.
    """

    model: Mapping[str, str]
    id_name: str
    images: int
    examples: int
    classification: Mapping[str, Classification]
    ood_images: Mapping[str, int]
    separation: Mapping[str, Mapping[str, Separation]]
    flagged: Mapping[str, float]
    false_alarms: RealisedRate
    misses: RealisedRate
    mean_set_size: float
    ambiguity: Mapping[str, float] = field(default_factory=dict)
