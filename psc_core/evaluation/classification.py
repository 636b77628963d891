"""Evaluate a classifier, beside the detectors that people use instead: losses, metrics, sentences and the report.

One pass over each data set keeps a handful of float64 numbers for each image (scores) and each labelled example
(losses), but no features and no probabilities.  If images have several labels, accuracy, likelihood and selective
metrics count labelled examples; OOD scores, false alarms and prediction sets count images, and a set is right if it
contains the first label, as in calibration.

Acceptance counts accepting an OOD image as an error.  Every score alone is compared with the decision of the service,
which rejects an image for its OOD score or for its predictive entropy: with one false-alarm rate for both, that is a
threshold on the larger of an image's two ranks among in-distribution images.  The predicted class is the service's.

The sentences hold one rule for and against PSC: an OOD score *wins* over another if their AUROC differs by more than
:data:`STANDARD_ERRORS` standard errors of the paired difference, else they *tie*.  Classifiers are only ranked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from psc_core import metrics
from psc_core.compute import Compute
from psc_core.conformal import tolerant_ceil
from psc_core.data.dataset import Batch, ImageDataset
from psc_core.data.open import check_same, is_table, open_dataset
from psc_core.errors import UsageError
from psc_core.evaluation.baselines import DETECTORS, Baselines, PlainClassifier, fit_baselines
from psc_core.evaluation.evaluate import (
    AUROC_MEANS,
    AUTOMATED,
    FALSE_ALARMS,
    LEVEL,
    NO_OTHERS,
    OTHERS,
    PRIMARY,
    Evaluator,
    ObservedRate,
    Report,
    Table,
    describe_rate,
    observed_rate,
    percent,
)
from psc_core.heads.base import entropy
from psc_core.metrics import Difference, aurc, coverage_at_risk, ece, label_brier, label_nll, placements
from psc_core.model import PSC
from psc_core.network.cut import trial_input
from psc_core.network.layers import list_layers
from psc_core.network.load import bounded_size, load_network
from psc_core.scoring import scored_batches
from psc_core.settings import BATCH_IMAGES
from psc_core.tasks.classification import CODE_ACCEPT


class Losses(NamedTuple):
    nll: Float[Tensor, " n"]  # nats
    brier: Float[Tensor, " n"]  # in [0, 2]
    confidence: Float[Tensor, " n"]  # the highest probability
    correct: Bool[Tensor, " n"]  # whether the most probable class is the label


def losses_of(probabilities: Float[Tensor, "batch classes"], batch: Batch) -> Losses:
    p, labels = batch.per_example(probabilities), batch.labels
    confidence, predicted = p.double().max(1)
    return Losses(label_nll(p, labels), label_brier(p, labels), confidence, predicted == labels)


class Quality(NamedTuple):
    """A metric of a classifier."""

    title: str
    meaning: str
    compute: Callable[[Losses], float]


QUALITIES: Final[Mapping[str, Quality]] = {
    "accuracy": Quality("Accuracy", "fraction of right answers", lambda of: float(of.correct.double().mean())),
    "nll": Quality(
        "NLL", "mean of −log(probability of the label), nats; lower is better", lambda of: float(of.nll.mean())
    ),
    "brier": Quality("Brier", "squared error of the probabilities, 0 to 2", lambda of: float(of.brier.mean())),
    "ece": Quality("ECE", "mean gap between confidence and accuracy", lambda of: ece(of.confidence, of.correct)),
    "adaptive_ece": Quality(
        "aECE", "the same in bins of equally many answers", lambda of: metrics.adaptive_ece(of.confidence, of.correct)
    ),
    "aurc": Quality(
        "AURC",
        "error rate of accepted answers, mean over all shares accepted",
        lambda of: aurc(of.confidence, of.correct),
    ),
    "augrc": Quality(
        "AUGRC", "accepted errors among all answers, likewise", lambda of: metrics.augrc(of.confidence, of.correct)
    ),
    "coverage_at_risk_1_percent": Quality(
        "cov@1%",
        "largest share of answers, the most confident first, of which 1 % are wrong",
        lambda of: coverage_at_risk(of.confidence, of.correct, 0.01),
    ),
    "coverage_at_risk_5_percent": Quality(
        "cov@5%", "the same for 5 %", lambda of: coverage_at_risk(of.confidence, of.correct, 0.05)
    ),
}

ENTROPY: Final = f"{PRIMARY}-entropy"  # the name of the score by which the service calls an image ambiguous
EPISTEMIC: Final = f"{PRIMARY}-epistemic"  # the name of the head's epistemic uncertainty
DECISION: Final = f"{PRIMARY}-decision"  # the name of the OOD score and the predictive entropy combined into one score
SCORES: Final = {
    PRIMARY: "the OOD score, by which the service decides what is out of distribution",
    ENTROPY: "predictive entropy, by which it decides what is ambiguous",
    EPISTEMIC: "the head's epistemic uncertainty",
    DECISION: "both thresholds together, as the service decides",
    **DETECTORS,
}
SEPARATION_WORDS: Final = {
    "AUROC": AUROC_MEANS,
    "AUPR in": "average precision of the known images",
    "AUPR out": "average precision of the OOD images",
    "FPR95": "fraction of known images that is rejected where 95 % of the OOD images are",
    "PSC ahead by": "AUROC of psc less that of the row, ± standard error",
}
ACCEPTANCE_WORDS: Final = {
    "OOD accepted": "fraction of the OOD images that a threshold accepts with 95 % of the known images",
    "AURC with OOD": "AURC over known and OOD images, where an accepted OOD image is an error",
}
RATE_WORDS: Final = {
    "interval": "rates that explain the count",
    "binomial": "counts that the nominal rate explains",
    "beta-binomial": "the same, where few images set the threshold",
}
FIELDS: Final = {ENTROPY: "predictive_entropy", EPISTEMIC: "epistemic"}  # other scores of every answer, by field


@dataclass(frozen=True)
class Separation:
    """The quality of one score as a detector of OOD images."""

    auroc: float
    aupr_in: float  # average precision, in-distribution positive
    aupr_out: float  # average precision, OOD positive
    fpr95: float  # fraction of in-distribution images rejected when 95 % of the OOD images are
    auroc_difference: Difference  # AUROC of the primary score minus this one's, with its standard error
    threshold: float  # exceeded by the fraction α of the in-distribution images


def separation(
    inside: Mapping[str, Float[Tensor, " n"]], outside: Mapping[str, Float[Tensor, " m"]], alpha: float
) -> dict[str, Separation]:
    """Compare two sets of images by every score, and each AUROC with the primary score's."""
    return {
        name: Separation(
            auroc=metrics.auroc(inside[name], outside[name]),
            aupr_in=metrics.aupr(-inside[name], -outside[name]),
            aupr_out=metrics.aupr(outside[name], inside[name]),
            fpr95=metrics.fpr95(inside[name], outside[name]),
            auroc_difference=metrics.auroc_difference(inside[PRIMARY], outside[PRIMARY], inside[name], outside[name]),
            threshold=float(inside[name].kthvalue(max(1, tolerant_ceil((1 - alpha) * len(inside[name])))).values),
        )
        for name in inside
    }


ACCEPTED: Final = 0.95  # fraction of in-distribution images that a threshold accepts


@dataclass(frozen=True)
class Acceptance:
    """The errors of thresholds on one score, counting an accepted OOD image or a wrong class as an error."""

    ood_accepted: float  # fraction of OOD images accepted if 95 % of the in-distribution images are
    aurc: float  # area under the risk-coverage curve, over both sets of images


def acceptance(
    inside: Mapping[str, Float[Tensor, " n"]], outside: Mapping[str, Float[Tensor, " m"]], correct: Bool[Tensor, " n"]
) -> dict[str, Acceptance]:
    """Return the acceptance for thresholds on each score, and for the decision of the service."""
    ranked = []
    for scores in (inside, outside):
        ood, ambiguous = (placements(scores[name], inside[name]) for name in (PRIMARY, ENTROPY))
        ranked.append({DECISION: torch.maximum(ood, ambiguous), **scores})
    found = {}
    for name, known in ranked[0].items():
        unknown = ranked[1][name]
        right = torch.cat([correct, correct.new_zeros(len(unknown))])
        found[name] = Acceptance(ood_accepted(known, unknown), aurc(-torch.cat([known, unknown]), right))
    return found


def ood_accepted(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return the fraction of OOD images under the lowest threshold that accepts :data:`ACCEPTED` of the others."""
    metrics.check_values("ood_accepted", in_scores, out_scores)
    ordered = in_scores.sort().values
    # The margin forgives the rounding of the product.
    accepted = torch.arange(1, len(ordered) + 1) >= ACCEPTED * len(ordered) - 1e-9
    threshold = ordered[int(accepted.long().argmax())]
    return float((out_scores <= threshold).double().mean())


STANDARD_ERRORS: Final = 2.0  # minimum difference, in standard errors, at which one score beats another
COMPARED: Final = ("accuracy", "nll", "ece")  # the metrics by which classifiers are compared


def compare_scores(ood: str, scores: Mapping[str, Separation]) -> str:
    psc = scores[PRIMARY]
    others = [name for name in scores if not name.startswith(PRIMARY)]
    if not others:
        return f"{ood}: PSC reaches AUROC {psc.auroc:.4f}; no other method was run."
    best = max(others, key=lambda name: scores[name].auroc)
    better = [name for name in others if is_significant(scores[name].auroc_difference, sign=-1)]
    difference = scores[best].auroc_difference
    apart = f"difference {difference.value:+.4f} with a standard error of {difference.standard_error:.4f}"
    numbers = f"AUROC {psc.auroc:.4f} against {scores[best].auroc:.4f}, {apart}"
    if better:
        return f"{ood}: PSC loses to {', '.join(better)}; the best is {best} ({numbers})."
    if is_significant(difference):
        return f"{ood}: PSC wins; the next is {best} ({numbers})."
    return f"{ood}: PSC ties with {best} ({numbers})."


def better_fields(ood: str, scores: Mapping[str, Separation], id_name: str, alpha: float) -> list[str]:
    """Describe the other fields of an answer that beat the OOD score on one OOD set, and how to decide by them."""
    return [
        f"{ood}: the field {field} of the same answers would do better (AUROC {scores[name].auroc:.4f} against "
        f"{scores[PRIMARY].auroc:.4f}). To use it, nothing is fitted again: call an image out of distribution where "
        f"{field} > {scores[name].threshold:.6g}, which {alpha:g} of {id_name} exceed."
        for name, field in FIELDS.items()
        if name in scores and is_significant(scores[name].auroc_difference, sign=-1)
    ]


def describe_acceptance(ood: str, found: Mapping[str, Acceptance], id_name: str) -> str:
    """Say how much of one OOD set would be accepted by thresholds that treat known images alike: PSC's, and others'."""
    accepted = {name: percent(value.ood_accepted) for name, value in found.items()}
    best = min((name for name in found if not name.startswith(PRIMARY)), key=lambda name: found[name].ood_accepted)
    return (
        f"{ood}: if thresholds were moved to accept 95 % of {id_name}, {accepted[DECISION]} of these images would be "
        f"accepted by both of PSC's, {accepted[PRIMARY]} by its OOD score alone, and {accepted[best]} by {best}."
    )


def is_significant(difference: Difference, *, sign: int = 1) -> bool:
    """Return whether a difference of this sign exceeds :data:`STANDARD_ERRORS` standard errors."""
    return sign * difference.value > STANDARD_ERRORS * difference.standard_error


def compare_classifiers(classifiers: Mapping[str, Mapping[str, float]], metric: str) -> str:
    values = {name: quality[metric] for name, quality in classifiers.items()}
    best = max(values.values()) if metric == "accuracy" else min(values.values())
    names = [name for name, value in values.items() if value == best]
    listed = ", ".join(f"{name} {value:.4f}" for name, value in values.items())
    return f"{QUALITIES[metric].title}: best is {' and '.join(names)} ({listed})."


@dataclass(frozen=True)
class ClassCounts:
    """Numbers of in-distribution images of one class, by their (first) label."""

    images: int
    right: int
    accepted: int
    accepted_wrong: int
    false_alarms: int


def count_by_class(inside: ScoredImages, labels: Int[Tensor, " n"], classes: Sequence[str]) -> dict[str, ClassCounts]:
    """Count the images of each class that has any."""
    every = torch.ones_like(inside.alarm)
    parts = (every, inside.correct, inside.accepted, inside.accepted_wrong, inside.alarm)
    counts = torch.stack([labels[part].bincount(minlength=len(classes)) for part in parts], dim=1)
    return {name: ClassCounts(*row) for name, row in zip(classes, counts.tolist(), strict=True) if row[0]}


@dataclass(frozen=True)
class Doubled:
    """What twice the alpha would call out of distribution."""

    alpha: float
    false_alarms: float  # fraction of the in-distribution images
    flagged: Mapping[str, float]  # fraction of each OOD set

    @classmethod
    def of(cls, model: PSC, inside: ScoredImages, outside: Mapping[str, ScoredImages]) -> Doubled:
        alpha = min(2 * model.policy.alpha, (1 + model.policy.alpha) / 2)
        limit = model.calibration.ood_score_threshold(alpha)
        flagged = {name: float((scored.ood[PRIMARY] > limit).double().mean()) for name, scored in outside.items()}
        return cls(alpha, float((inside.ood[PRIMARY] > limit).double().mean()), flagged)


LISTED: Final = 20  # maximum number of classes in the table of classes


@dataclass(frozen=True)
class ClassificationReport(Report):
    """Everything that ``psc-eval`` measures of a classifier."""

    examples: int  # labelled examples in the in-distribution data
    classification: Mapping[str, Mapping[str, float]]  # by classifier and metric of :data:`QUALITIES`
    ood_images: Mapping[str, int]  # number of images in each OOD set
    separation: Mapping[str, Mapping[str, Separation]]  # by OOD set and score
    acceptance: Mapping[str, Mapping[str, Acceptance]]  # by OOD set and score
    flagged: Mapping[str, float]  # fraction of each OOD set with p-value ≤ α
    ood_accepted: Mapping[str, float]  # fraction of each OOD set that is neither out of distribution nor ambiguous
    doubled: Doubled
    false_alarms: ObservedRate  # in-distribution images with p-value ≤ α
    misses: ObservedRate  # in-distribution images whose (first) label is outside the prediction set
    risk: float | None  # promised error rate of accepted images; None if none is
    accepted: int  # number of in-distribution images that are neither out of distribution nor ambiguous
    accepted_wrong: int  # number of these whose (first) label is not predicted
    mean_set_size: float  # mean number of classes in a prediction set
    by_class: Mapping[str, ClassCounts]
    has_checks: bool  # without them the model cannot learn what people reviewed
    ambiguity: Mapping[str, float] = field(default_factory=dict)  # AUROC of entropy by classifier; empty if none

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON types; an unknown standard error is null."""
        data = super().to_json()
        for scores in data["separation"].values():
            for score in scores.values():
                value, error = score["auroc_difference"]
                score["auroc_difference"] = {"value": value, "standard_error": error if error != float("inf") else None}
        return data

    def heading(self) -> str:
        model = " ".join(value for value in (self.model["name"], self.model["version"]) if value)
        labels = "" if self.examples == self.images else f", {self.examples} labels"
        return f"{model} (layer {self.model['layer']}) on {self.id_name}: {self.images} images{labels}"

    def answers(self) -> dict[str, list[str]]:
        alarms = self.false_alarms
        return {
            "Are the answers right?": self._right(),
            AUTOMATED: self._automated(),
            FALSE_ALARMS: [
                describe_rate("False alarms", alarms),
                *(f"Most: class {name}." for name in self._most(lambda of: of.false_alarms)),
            ],
            OTHERS: [*(each for ood in self.separation for each in self._found(ood)), *self._remedy()] or [NO_OTHERS],
            "Do prediction sets hold the label?": [
                describe_rate("Labels outside the prediction set", self.misses),
                f"The mean size of a set is {self.mean_set_size:.3g}.",
            ],
        }

    def _automated(self) -> list[str]:
        """Say how many images are accepted, how many of these are wrong, and what was promised."""
        accepted, wrong, alarms = self.accepted, self.accepted_wrong, self.false_alarms.count
        sentences = [f"{accepted} of {self.images} images are accepted ({percent(accepted / self.images)})."]
        if accepted:
            low, high = metrics.binomial_interval(wrong, accepted, level=LEVEL)
            chance = f"{percent(low)} to {percent(high)} with {LEVEL:.0%} confidence"
            sentences.append(
                f"Wrong among the accepted: {percent(wrong / accepted)} ({wrong} of {accepted}; {chance})."
            )
            if self.risk is not None:
                promised = f"at most {percent(self.risk)}"
                if low > self.risk:
                    kept = f"More than promised, which was {promised}"
                elif high <= self.risk:
                    kept = f"As promised: {promised}"
                else:  # A half of what the interval leaves out lies above it.
                    enough = math.ceil(math.log((1 - LEVEL) / 2) / math.log1p(-self.risk))
                    wanted = f": {enough} that are all right would show" if accepted < enough else " whether it keeps"
                    kept = f"Not enough images to tell{wanted} the promised {promised}"
                sentences[-1] += f" {kept}."
        sentences += [
            f"Most errors that are accepted: class {name}." for name in self._most(lambda of: of.accepted_wrong)
        ]
        return [*sentences, f"The others go to a person: {alarms} unusual, {self.images - accepted - alarms} unclear."]

    def _right(self) -> list[str]:
        """Say how many answers are right, which class has the fewest, and which classifier is best."""
        accuracy = self.classification[PRIMARY]["accuracy"]
        sentences = [f"{100 * accuracy:.4g} % of {self.examples} are right."]
        sentences += [f"Most errors: class {name}." for name in self._most(lambda of: of.images - of.right)]
        if len(self.classification) > 1:
            sentences += [compare_classifiers(self.classification, metric) for metric in COMPARED]
        return sentences

    def _most(self, count: Callable[[ClassCounts], int]) -> list[str]:
        """Describe the class with the largest part of its images counted; nothing for one class or a count of 0."""
        if len(self.by_class) < 2:
            return []
        name, found = max(self.by_class.items(), key=lambda item: count(item[1]) / item[1].images)
        part = count(found)
        return [f"{name}, {percent(part / found.images)} ({part} of {found.images})"] if part else []

    def _remedy(self) -> list[str]:
        """Say what twice the alpha would do, and what to do with labels, if not nearly all other images are found."""
        if not self.flagged or min(self.flagged.values()) >= ACCEPTED:
            return []
        doubled = self.doubled
        found = ", ".join(f"{percent(part)} of {name}" for name, part in doubled.flagged.items())
        apart = [part for name, part in self.flagged.items() if name not in self.shared]
        can_learn = self.has_checks and min(apart, default=1) < ACCEPTED  # Of shared images it would learn its classes.
        teaches = " Ten such images teach it: psc-recalibrate --learn." if can_learn else ""
        return [
            f"With alpha {doubled.alpha:g} (psc-serve --alpha, ?alpha= of a request): {found}, and "
            f"{percent(doubled.false_alarms)} of {self.id_name}.{teaches}"
        ]

    def _found(self, ood: str) -> list[str]:
        """Say how many images of one OOD set are found, and whether another score finds them better."""
        scores, found = self.separation[ood], self.acceptance.get(ood)
        flagged, accepted = self.flagged[ood], self.ood_accepted[ood]
        sentences = [
            f"{ood}: of {self.ood_images[ood]} images {percent(flagged)} are called out of distribution, "
            f"{percent(max(0.0, 1 - flagged - accepted))} unclear, and {percent(accepted)} are accepted.",
            compare_scores(ood, scores),
            *better_fields(ood, scores, self.id_name, self.false_alarms.nominal),
        ]
        if found and any(not name.startswith(PRIMARY) for name in found):
            sentences.append(describe_acceptance(ood, found, self.id_name))
        return sentences

    def tables(self) -> list[Table]:
        found = [self._classifiers()]
        if len(self.by_class) > 1:
            found.append(self._classes())
        for ood in self.separation:
            found += [self._separation_of(ood), self._acceptance_of(ood)]
        found.append(self._rates())
        if self.ambiguity:
            rows = [[name, f"{value:.4f}"] for name, value in self.ambiguity.items()]
            found.append(Table("Ambiguous against clean images", ["entropy of", "AUROC"], rows))
        return found

    def _classifiers(self) -> Table:
        rows = [
            [name, *(f"{quality[metric]:.4f}" for metric in QUALITIES)] for name, quality in self.classification.items()
        ]
        words = {quality.title: quality.meaning for quality in QUALITIES.values()}
        return Table("Classification", ["classifier", *words], rows, words)

    def _classes(self) -> Table:
        listed = sorted(self.by_class.items(), key=lambda item: item[1].right / item[1].images)[:LISTED]
        header = ["class", "images", "right", "accepted", "wrong of these", "unusual"]
        rows = [
            [
                name,
                str(of.images),
                f"{of.right / of.images:.4f}",
                *map(str, (of.accepted, of.accepted_wrong, of.false_alarms)),
            ]
            for name, of in listed
        ]
        few = len(listed) < len(self.by_class)
        title = f"By class{f', the {LISTED} with most errors of {len(self.by_class)}' if few else ''}"
        return Table(title, header, rows, folded=False)

    def _separation_of(self, ood: str) -> Table:
        ranked = sorted(self.separation[ood].items(), key=lambda item: -item[1].auroc)
        rows = [
            [
                name,
                *(f"{value:.4f}" for value in (s.auroc, s.aupr_in, s.aupr_out, s.fpr95)),
                "" if name == PRIMARY else "{:+.4f} ± {:.4f}".format(*s.auroc_difference),
            ]
            for name, s in ranked
        ]
        header = ["score", "AUROC", "AUPR in", "AUPR out", "FPR95", "PSC ahead by"]
        return Table(f"{ood}: {self.ood_images[ood]} OOD images", header, rows, SEPARATION_WORDS | _scores_in(rows))

    def _acceptance_of(self, ood: str) -> Table:
        ranked = sorted(self.acceptance[ood].items(), key=lambda item: item[1].ood_accepted)
        rows = [[name, f"{found.ood_accepted:.4f}", f"{found.aurc:.4f}"] for name, found in ranked]
        title, header = f"{ood}: accepted beside 95 % of {self.id_name}", ["score", "OOD accepted", "AURC with OOD"]
        return Table(title, header, rows, ACCEPTANCE_WORDS | _scores_in(rows))

    def _rates(self) -> Table:
        alarms, misses = self.false_alarms, self.misses
        header = ["rate", "nominal", "observed", f"{alarms.level:.0%} interval", "count", "binomial", "beta-binomial"]
        rows = [
            _cells(f"false alarms (p ≤ {alarms.nominal:g})", alarms),
            _cells(f"label outside {1 - misses.nominal:.0%} set", misses),
        ]
        rows += [
            [f"flagged in {name}", "", f"{fraction:.4f}", "", "", "", ""] for name, fraction in self.flagged.items()
        ]
        rows.append(["mean prediction set", "", f"{self.mean_set_size:.3f}", "", "", "", ""])
        return Table("Rates", header, rows, RATE_WORDS)


def _scores_in(rows: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return what the scores in the first column mean."""
    return {name: SCORES[name] for name, *_ in rows if name in SCORES}


def _cells(name: str, rate: ObservedRate) -> list[str]:
    return [
        name,
        f"{rate.nominal:.4f}",
        f"{rate.rate:.4f}",
        f"{rate.interval.low:.4f}…{rate.interval.high:.4f}",
        str(rate.count),
        f"{rate.acceptance.low}…{rate.acceptance.high}",
        f"{rate.calibrated_acceptance.low}…{rate.calibrated_acceptance.high}",
    ]


AMBIGUOUS_PREFIX: Final = "ambiguous"  # of the names of groups of ambiguous images


@dataclass(frozen=True)
class ScoredImages:
    """The scores and losses that one pass keeps of n images, on the CPU, in the order of the data set."""

    ood: Mapping[str, Float[Tensor, " n"]]  # by score, float64; higher is more unusual
    alarm: Bool[Tensor, " n"]  # p-value ≤ α
    accepted: Bool[Tensor, " n"]  # neither out of distribution nor ambiguous
    entropy: Mapping[str, Float[Tensor, " n"]]  # by classifier, float64, nats
    set_size: Int[Tensor, " n"]  # classes in the prediction set
    predicted: Int[Tensor, " n"]  # the most probable class
    correct: Bool[Tensor, " m"]  # whether the first label is predicted; empty for data of other classes
    covered: Bool[Tensor, " m"]  # whether the first label is in the set; empty for data of other classes
    losses: Mapping[str, Losses]  # by classifier; empty for data of other classes

    @property
    def accepted_wrong(self) -> Bool[Tensor, " n"]:
        return self.accepted & ~self.correct


def _joined(parts: Sequence[Any]) -> Any:
    """Return tensors, or what holds tensors, of parts of the images one after the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([*parts])
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    return Losses(*map(_joined, zip(*parts, strict=True)))


def _whole_network(model: PSC, weights: Path) -> nn.Module:
    """Build the network that the model was cut from: by its name, or without one from the file given to fit."""
    network = model.backbone.cut.network
    if model.network_classes != model.classes:
        raise UsageError(
            f"the network of {model.name} does not know {model.classes[-1]}, which was added; leave out --weights"
        )
    if network is not None:
        with bounded_size(network):
            return load_network(**network.to_json(), weights=weights)
    if weights.suffix == ".onnx" or weights.is_dir():
        return load_network(f"{'hf' if weights.is_dir() else 'onnx'}:{weights}", num_classes=len(model.classes))
    raise UsageError(
        f"expected --weights to be an ONNX file, or a folder of transformers, of the whole network: the bundle of "
        f"{model.name} holds a graph that ends at its layers, and no name builds the rest; got {weights}"
    )


def ambiguity(entropies: Mapping[str, Tensor], groups: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the AUROC of each classifier's entropy for ambiguous against clean images; none unless there are both."""
    ambiguous = [part for name, part in groups.items() if len(part) and name.startswith(AMBIGUOUS_PREFIX)]
    clean = [part for name, part in groups.items() if len(part) and not name.startswith(AMBIGUOUS_PREFIX)]
    if not ambiguous or not clean:
        return {}
    inside, outside = torch.cat(clean), torch.cat(ambiguous)
    return {name: metrics.auroc(values[inside], values[outside]) for name, values in entropies.items()}


class ClassificationEvaluator(Evaluator[PSC, ScoredImages, Baselines | PlainClassifier]):
    has_baselines = True

    def open_images(self, model: PSC, spec: str, *, split: str = "test", target: str | None = None) -> ImageDataset:
        target = target if is_table(spec) else None
        data = open_dataset(spec, split=split, preprocess=model.preprocess, numbers=False, target=target)
        return data.in_order(model.classes)

    def open_baselines(
        self, model: PSC, weights: Path, train: ImageDataset, val: ImageDataset, *, batch_images: int = BATCH_IMAGES
    ) -> Baselines:
        net = _whole_network(model, weights)
        for data in (train, val):
            check_same(data, model.classes, "model's")
        layers = list_layers(net, trial_input(model.preprocess))
        penultimate = [layer.name for layer in layers if layer.role == "penultimate"]
        if not penultimate:
            raise UsageError(f"expected a network with a layer before its output for the baselines, {weights} has none")
        return fit_baselines(net, penultimate[0], train, val, compute=Compute(model.device, batch_images=batch_images))

    def original_network(self, net: nn.Module, data: ImageDataset, compute: Compute) -> PlainClassifier:
        return PlainClassifier(net.to(compute.device), data.preprocess, compute.precision)

    @torch.inference_mode()
    def score_images(
        self,
        model: PSC,
        data: ImageDataset,
        baselines: Baselines | PlainClassifier | None = None,
        *,
        batch_images: int = BATCH_IMAGES,
        packed: Tensor | None = None,
    ) -> ScoredImages:
        parts = []
        labelled = data.classes == model.classes
        for batch, images, of_batch in scored_batches(model, data, batch_images, packed=packed):
            outputs, decisions = model.outputs(of_batch), model.decide(model.outputs(of_batch.numpy()))
            scores = {PRIMARY: outputs["ood_score"], ENTROPY: outputs["predictive_entropy"]}
            if model.predictions == "psc":
                scores[EPISTEMIC] = outputs["epistemic"]
            probabilities, entropies = {PRIMARY: outputs.probabilities}, {PRIMARY: outputs["predictive_entropy"]}
            if baselines is not None:
                others = baselines.score(images)
                scores |= others.scores
                probabilities |= others.probabilities
                entropies |= {name: entropy(p.double()) for name, p in others.probabilities.items()}
            sets, predicted = torch.from_numpy(decisions.prediction_set), outputs.probabilities.argmax(1)
            first = batch.first_labels() if labelled else None
            none = torch.empty(0, dtype=torch.bool)
            parts.append(
                ScoredImages(
                    ood={name: values.double().cpu() for name, values in scores.items()},
                    alarm=torch.from_numpy(decisions.is_ood),
                    accepted=torch.from_numpy(decisions.decision == CODE_ACCEPT),
                    entropy={name: values.double().cpu() for name, values in entropies.items()},
                    set_size=sets.sum(1),
                    predicted=predicted,
                    correct=none if first is None else predicted == first,
                    covered=none if first is None else sets.gather(1, first[:, None]).squeeze(1),
                    losses={name: losses_of(p.cpu(), batch) for name, p in probabilities.items()} if labelled else {},
                )
            )
        return ScoredImages(**_joined([vars(part) for part in parts]))

    def quality_of(self, scored: ScoredImages, data: ImageDataset) -> dict[str, dict[str, float]]:
        """Return every metric of :data:`QUALITIES` by classifier; none for data of other classes."""
        return {
            name: {metric: quality.compute(losses) for metric, quality in QUALITIES.items()}
            for name, losses in scored.losses.items()
        }

    def compare(
        self, model: PSC, id_data: ImageDataset, inside: ScoredImages, outside: Mapping[str, ScoredImages]
    ) -> ClassificationReport:
        alpha, calibration_images = model.policy.alpha, len(model.calibration)
        return ClassificationReport(
            model={"name": model.name, "version": model.version, "layer": model.layer},
            id_name=id_data.name,
            images=len(id_data),
            examples=id_data.examples,
            classification=self.quality_of(inside, id_data),
            ood_images={name: len(scored.alarm) for name, scored in outside.items()},
            separation={name: separation(inside.ood, scored.ood, alpha) for name, scored in outside.items()},
            acceptance={name: acceptance(inside.ood, scored.ood, inside.correct) for name, scored in outside.items()},
            flagged={name: float(scored.alarm.double().mean()) for name, scored in outside.items()},
            ood_accepted={name: float(scored.accepted.double().mean()) for name, scored in outside.items()},
            doubled=Doubled.of(model, inside, outside),
            false_alarms=observed_rate(inside.alarm, alpha, calibration_images),
            misses=observed_rate(~inside.covered, 1 - model.policy.coverage, calibration_images),
            risk=model.policy.risk,
            accepted=int(inside.accepted.sum()),
            accepted_wrong=int(inside.accepted_wrong.sum()),
            mean_set_size=float(inside.set_size.double().mean()),
            by_class=count_by_class(inside, id_data.first_labels(), model.classes),
            has_checks=bool(model.checks),
            ambiguity=ambiguity(inside.entropy, id_data.groups),
        )
