"""What the report of each task keeps of a set of images, says of it, and draws besides the figures that all have.

A classifier's shows images; a regression's shows none.  y is the true number of an image; μ and σ are the predicted
number and its deviation, all in the target's unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final, cast

import torch
from jaxtyping import Bool, Float, Int, UInt8
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from psc_core.answers import ClassificationPolicy, RegressionPolicy, Target
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.classification import ClassificationEvaluator, ScoredImages
from psc_core.evaluation.evaluate import PRIMARY
from psc_core.evaluation.regression import RegressionEvaluator, ScoredNumbers, numbers_of
from psc_core.metrics import ECE_BINS, by_confidence
from psc_core.model import PSC, PSCRegressor
from psc_core.report.content import NO_CLASS, PREDICTORS, Facts, Picture, Role, ScoredSet, TaskReport
from psc_core.report.page import KNOWN, LIMIT, UNKNOWN, Figures, axes_of, scores
from psc_core.tasks.classification import Calibration, Classification
from psc_core.tasks.regression import Calibration as RegressionCalibration
from psc_core.tasks.regression import Regression, ends

# The words of all tasks.
TEXTS: Final[Mapping[str, tuple[str, str]]] = {
    "sizes": ("Size of the projection", "Squares mark the chosen number of components: the fewest that keep both."),
    "ood-scores": (
        "How unusual images are",
        "Right of the dashed line an image counts as out of distribution. Blue images belong left of it, orange ones "
        "right.",
    ),
    "roc": ("Detection against false alarms", "How much is found at each rate of false alarms; up and left is better."),
}

GLOSSARY: Final[Mapping[str, str]] = {
    "NC1": "Variability within classes as a fraction of all variability: 1 without classes, 0 when a class is a point.",
    "ε": "The NC1 below which a layer counts as collapsed.",
    "OOD score": "How unlike the training images an image is; higher is more unusual. Nats.",
    "alpha": "The rate of false alarms that the OOD threshold keeps on images like the calibration images, on average.",
    "synthetic OOD images": "Validation images turned, binarised, framed …, to see what happens without OOD images.",
}


def parts_of(data: ImageDataset) -> Mapping[str, Tensor]:
    """Return the groups of a data set; none if it has only one."""
    return data.groups if len(data.groups) > 1 else {}


CLASSES: Final = 20  # maximum number of classes whose images are shown
EACH: Final = 3  # number of pictures of a class for each reason
SIDE: Final = 96  # maximum height and width of a picture, in pixels


@dataclass(frozen=True)
class ClassificationSet(ScoredSet):
    entropy: Float[Tensor, " n"]  # predictive entropy, nats
    predicted: Int[Tensor, " n"]  # class index
    labels: Int[Tensor, " m"]  # first label of each image; empty for images of other classes
    confidence: Mapping[str, Float[Tensor, " examples"]] = field(default_factory=dict)  # by classifier
    correct: Mapping[str, Bool[Tensor, " examples"]] = field(default_factory=dict)  # by classifier


def thumbnail(data: ImageDataset, index: int) -> UInt8[Tensor, "channels height width"]:
    """Shrink an image, as the network sees it, to at most :data:`SIDE` pixels in each direction."""
    image = torch.from_numpy(data.image(index))
    longest = max(image.shape[1:])
    if longest <= SIDE:
        return image
    size = [max(1, round(side * SIDE / longest)) for side in image.shape[1:]]
    smaller = functional.interpolate(image[None].float(), size, mode="bilinear", antialias=True)[0]
    return smaller.round().clamp(0, 255).to(torch.uint8)


def picture_of(why: str, label: int, data: ImageDataset, scored: ScoredImages, at: int) -> Picture:
    score, entropy = float(scored.ood[PRIMARY][at]), float(scored.entropy[PRIMARY][at])
    return Picture(why, label, int(scored.predicted[at]), score, entropy, thumbnail(data, at))


def _first(order: Tensor, chosen: Tensor) -> list[int]:
    """Return the positions of the :data:`EACH` smallest values of ``order`` among the chosen."""
    positions = chosen.nonzero().flatten()
    kept: list[int] = positions[order[positions].argsort(stable=True)[:EACH]].tolist()
    return kept


ACCURACY_LOSS: Final = 0.01  # the loss of accuracy, compared to the original network's, above which a warning is given
MAX_CONFUSED: Final = 20  # maximum number of classes in the confusion matrix, those with the most errors


def reliability(images: ClassificationSet) -> Figure | None:
    """Draw the accuracy of each classifier against its confidence, in the bins of the ECE."""
    if not images.confidence:
        return None
    figure, axis = axes_of(3.8, 3.4)
    axis.plot([0, 1], [0, 1], "--", lw=0.8, color=LIMIT)
    for name, confidence in sorted(images.confidence.items()):
        index = (confidence * ECE_BINS).ceil().clamp(1, ECE_BINS).long() - 1
        count = index.bincount(minlength=ECE_BINS)
        sums = [torch.zeros(ECE_BINS).index_add_(0, index, part.float()) for part in (confidence, images.correct[name])]
        x, y = ((part[count > 0] / count[count > 0]).numpy() for part in sums)
        share = (count[count > 0] / count.sum()).numpy()
        axis.plot(x, y, lw=0.6, alpha=0.5, color=_colour(name))
        axis.scatter(x, y, s=4 + 80 * share, label=PREDICTORS.get(name, name), color=_colour(name))
    axis.set(xlabel="confidence", ylabel="fraction right", xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=7)
    return figure


def risk_coverage(images: ClassificationSet) -> Figure | None:
    """Draw the error rate of the accepted images against their fraction, the most confident first."""
    if not images.confidence:
        return None
    figure, axis = axes_of(3.8, 3.4)
    for name, confidence in sorted(images.confidence.items()):
        wrong = by_confidence(confidence, ~images.correct[name])
        accepted = torch.arange(1, len(wrong) + 1)
        risk = wrong.cumsum(0) / accepted
        x, label = (accepted / len(wrong)).numpy(), PREDICTORS.get(name, name)
        axis.plot(x, risk.numpy(), lw=1, label=label, color=_colour(name))
    axis.set(xlabel="fraction accepted", ylabel="error rate of these", xlim=(0, 1), ylim=(0, None))
    axis.legend(fontsize=7)
    return figure


def confusion(images: ClassificationSet, classes: Sequence[str]) -> Figure | None:
    """Draw true against predicted classes, at most the :data:`MAX_CONFUSED` classes with the most errors."""
    if not len(images.labels):
        return None
    kept, shown = most_confused(images.labels, images.predicted, len(classes))
    names = [classes[index] for index in kept.tolist()]
    figure, axis = axes_of(4.6, 4.2)
    mapped = axis.imshow(shown.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(mapped, ax=axis, shrink=0.8)
    axis.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=7)
    axis.set_yticks(range(len(names)), names, fontsize=7)
    for row, column in (shown >= 0.005).nonzero().tolist():
        value = float(shown[row, column])
        axis.text(column, row, f"{value:.0%}", ha="center", va="center", fontsize=5, color="w" if value > 0.5 else "k")
    axis.set(xlabel="predicted", ylabel="label")
    return figure


def most_confused(
    labels: Int[Tensor, " n"], predicted: Int[Tensor, " n"], classes: int
) -> tuple[Int[Tensor, " kept"], Float[Tensor, "kept kept"]]:
    """Return the classes with the most errors, ascending, and the fraction of each that is predicted as each."""
    errors = labels[labels != predicted].bincount(minlength=classes)
    kept = errors.argsort(descending=True, stable=True)[:MAX_CONFUSED].sort().values
    place, count = torch.full((classes,), -1), len(kept)
    place[kept] = torch.arange(count)
    rows, columns = place[labels], place[predicted]
    images, is_shown = rows[rows >= 0].bincount(minlength=count), (rows >= 0) & (columns >= 0)
    pairs = (rows * count + columns)[is_shown].bincount(minlength=count**2)
    return kept, pairs.reshape(count, count).float() / images[:, None].clamp_min(1)


def _colour(classifier: str) -> str | None:
    return {"original": LIMIT, "psc": KNOWN, "temperature": UNKNOWN}.get(classifier)


class ClassificationTaskReport(TaskReport[PSC, ScoredImages]):
    set_type = ClassificationSet
    templates = "classification"
    texts: ClassVar = {
        "collapse": (
            "Where the network collapses",
            "Deep layers forget how images of a class differ (NC1 falls). PSC reads the shaded layer: it still varies, "
            "NC1 > ε, and tells the classes apart, high NC4.",
        ),
        "sizes": TEXTS["sizes"],
        "ood-scores": TEXTS["ood-scores"],
        "entropies": (
            "How ambiguous images are",
            "Right of the dashed line an image that is not out of distribution counts as ambiguous.",
        ),
        "roc": TEXTS["roc"],
        "reliability": (
            "Is the confidence honest?",
            "On the diagonal, of the images with confidence 80 %, 80 % are right. Larger dots stand for more images.",
        ),
        "risk-coverage": (
            "What abstaining gains",
            "Error rate when the least confident images are left to a person; lower is better.",
        ),
        "confusion": ("What is taken for what", "A row is a class, a column what was predicted for it."),
    }
    no_limit: ClassVar = {"entropies": "No entropy is above the threshold, so no image is ambiguous."}
    columns: ClassVar = {"accuracy": "accuracy", "nll": "NLL, nats", "ece": "ECE"}
    digits = ".4f"
    recorded: ClassVar = {"accuracy": "accuracy", "nll": "nll_nats", "ece": "ece"}
    glossary: ClassVar = {
        "NC1": GLOSSARY["NC1"],
        "NC4": "How often the nearest class mean is that of the label, on validation images.",
        "ε": GLOSSARY["ε"],
        "OOD score": GLOSSARY["OOD score"],
        "alpha": GLOSSARY["alpha"],
        "predictive entropy": "How undecided the probabilities are: 0 when sure, log(classes) when all are equal.",
        "ambiguous": "In distribution, but with a predictive entropy above the threshold.",
        "NLL": "Mean of −log(probability of the label); lower is better. Nats.",
        "ECE": "Mean gap between confidence and accuracy; 0 is honest.",
        "synthetic OOD images": GLOSSARY["synthetic OOD images"],
        "check": "A value with its own p-value: texture (early layer), content (chosen layer), confidence (head).",
    }
    hub_task = "image-classification"
    wrong = "are wrong"

    def scored_set(self, name: str, role: Role, data: ImageDataset, scored: ScoredImages) -> ClassificationSet:
        return ClassificationSet(
            name,
            role,
            scored.ood[PRIMARY].float(),
            scored.entropy[PRIMARY].float(),
            scored.predicted,
            data.first_labels() if scored.losses else torch.empty(0, dtype=torch.int64),
            {classifier: losses.confidence.float() for classifier, losses in scored.losses.items()},
            {classifier: losses.correct for classifier, losses in scored.losses.items()},
            quality=ClassificationEvaluator().quality_of(scored, data),
            groups=parts_of(data),
        )

    def synthetic_set(self, name: str, model: PSC, packed: Float[Tensor, "n columns"]) -> ClassificationSet:
        outputs, none = model.outputs(packed), torch.empty(0, dtype=torch.int64)
        entropies, predicted = outputs["predictive_entropy"].float(), outputs.probabilities.argmax(1)
        return ClassificationSet(name, Role.SYNTHETIC, outputs["ood_score"].float(), entropies, predicted, none)

    def limits_of(self, policy: ClassificationPolicy, calibration: Calibration) -> dict[str, float | None]:
        can_be_ambiguous = policy.can_be_ambiguous(calibration.num_classes)
        return {"entropies": policy.ambiguity_threshold if can_be_ambiguous else None}

    def judge(
        self, images: ClassificationSet, policy: ClassificationPolicy, calibration: Calibration
    ) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
        return ~(images.entropy <= policy.ambiguity_threshold), images.predicted != images.labels

    def policy_lines(
        self, task: Classification, policy: ClassificationPolicy, limits: Mapping[str, float | None]
    ) -> list[str]:
        threshold = limits["entropies"]
        if policy.ambiguity_threshold < 0:
            return ["ambiguous: every other image"]
        return [f"ambiguous: {'none' if threshold is None else f'predictive entropy above {threshold:.4g} nats'}"]

    def accuracy_lost(self, base: Mapping[str, float], psc: Mapping[str, float]) -> str:
        lost = base.get("accuracy", 0) - psc.get("accuracy", 0)
        return f"{lost:.3f}" if lost > ACCURACY_LOSS else ""

    def draw(self, facts: Facts) -> Figures:
        sets, limit, last = facts.content.sets, facts.limits["entropies"], facts.measured
        found: Figures = {"entropies": scores(sets, "entropy", "predictive entropy, nats", limit)}
        if isinstance(last, ClassificationSet):
            found |= {
                "reliability": reliability(last),
                "risk-coverage": risk_coverage(last),
                "confusion": confusion(last, facts.manifest.classes),
            }
        return found

    def pictures_of(self, data: ImageDataset, scored: ScoredImages) -> tuple[Picture, ...]:
        """Return the most unusual, most ambiguous and most typical images of the first :data:`CLASSES` classes."""
        labels, score, entropy = data.first_labels(), scored.ood[PRIMARY], scored.entropy[PRIMARY]
        every = torch.ones_like(scored.accepted)
        ranked: Mapping[str, tuple[Tensor, Tensor]] = {
            "accepted, but wrong": (entropy, scored.accepted_wrong),
            "most unusual": (-score, every),
            "most ambiguous": (-entropy, every),
            "most typical": (score, every),
        }
        return tuple(
            picture_of(why, label, data, scored, at)
            for label in range(min(CLASSES, len(data.classes)))
            for why, (order, among) in ranked.items()
            for at in _first(order, among & (labels == label))
        )

    def accepted_of(self, name: str, data: ImageDataset, scored: ScoredImages) -> tuple[Picture, ...]:
        """Return the least unusual accepted images of every class that is predicted for some."""
        return tuple(
            picture_of(f"{name}, accepted", NO_CLASS, data, scored, at)
            for predicted in scored.predicted[scored.accepted].bincount().nonzero()[:CLASSES]
            for at in _first(scored.ood[PRIMARY], scored.accepted & (scored.predicted == predicted))
        )

    def warnings_of(self, head: Mapping[str, float]) -> list[str]:
        above, error = head.get("nll_above_own", 0.0), head.get("nll_above_own_error", 0.0)
        served = (
            "the network's own probabilities are served, divided by a temperature: the NLL of the head's is "
            f"{above:.3f} ± {error:.3f} nats higher on validation images; --predictions psc serves the head's"
        )
        return [served] if above > error else []


@dataclass(frozen=True)
class RegressionSet(ScoredSet):
    """The numbers that a regression predicts for n images, in the target's unit."""

    mean: Float[Tensor, " n"]
    deviation: Float[Tensor, " n"]  # predicted standard deviation
    values: Float[Tensor, " m"]  # the true numbers; empty for images without them


RMSE_LOSS: Final = 0.05  # the relative rise of the RMSE above which, likewise
COVERAGES: Final = 19  # the number of nominal coverages, evenly spaced between 0 and 1, at which intervals are checked


def predictions(images: RegressionSet, target: Target) -> Figure:
    """Draw μ against y, and the diagonal."""
    figure, axis = axes_of(3.8, 3.4)
    ends = [float(images.values.min()), float(images.values.max())]
    axis.plot(ends, ends, "--", lw=0.8, color=LIMIT)
    axis.plot(images.values.numpy(), images.mean.numpy(), ".", ms=4, alpha=0.6, mew=0, color=KNOWN)
    axis.set(xlabel=f"true {target}", ylabel="predicted")
    return figure


def coverage(images: RegressionSet, calibration: RegressionCalibration) -> Figure:
    """Draw the fraction of true numbers inside the stated intervals, and those of N(μ, σ²), for each coverage."""
    figure, axis = axes_of(3.8, 3.4)
    axis.plot([0, 1], [0, 1], "--", lw=0.8, color=LIMIT)
    residuals = (images.values - images.mean.double()).abs() / images.deviation.double()
    nominal = torch.arange(1, COVERAGES + 1, dtype=torch.float64) / (COVERAGES + 1)
    stated = nominal[nominal <= len(calibration) / (len(calibration) + 1)]  # no higher coverage can be stated
    for name, at, half_widths, colour in (
        ("stated intervals", stated, torch.tensor([calibration.quantile(c) for c in stated.tolist()]), KNOWN),
        ("normal distribution", nominal, math.sqrt(2) * torch.erfinv(nominal), LIMIT),
    ):
        held = (residuals[:, None] <= half_widths).double().mean(0)
        axis.plot(at.numpy(), held.numpy(), "o-", ms=3, lw=1, label=name, color=colour)
    axis.set(xlabel="nominal coverage", ylabel="fraction that contains the number", xlim=(0, 1), ylim=(0, 1))
    axis.legend(fontsize=7)
    return figure


def error_coverage(images: RegressionSet, target: Target) -> Figure:
    """Draw the RMSE of the accepted images against their fraction, by smallest σ first and by smallest error first."""
    figure, axis = axes_of(3.8, 3.4)
    squares = (images.values - images.mean.double()).square()
    accepted = torch.arange(1, len(squares) + 1)
    for name, key, style, colour in (
        ("by predicted deviation", images.deviation, "-", KNOWN),
        ("if the errors were known", squares, ":", UNKNOWN),
    ):
        left = (by_confidence(-key, squares).cumsum(0) / accepted).sqrt()
        axis.plot((accepted / len(squares)).numpy(), left.numpy(), style, lw=1, label=name, color=colour)
    axis.axhline(float(squares.mean().sqrt()), ls="--", lw=0.8, color=LIMIT, label="of all")
    unit = f", {target.unit}" if target.unit else ""
    axis.set(xlabel="fraction accepted", ylabel=f"RMSE of these{unit}", xlim=(0, 1), ylim=(0, None))
    axis.legend(fontsize=7)
    return figure


class RegressionTaskReport(TaskReport[PSCRegressor, ScoredNumbers]):
    set_type = RegressionSet
    templates = "regression"
    texts: ClassVar = {
        "collapse": (
            "Where the network collapses",
            "Deep layers forget how images with about the same number differ (NC1 falls). PSC reads the shaded layer: "
            "it still varies, NC1 > ε, and predicts the number, high R².",
        ),
        "sizes": TEXTS["sizes"],
        "ood-scores": TEXTS["ood-scores"],
        "deviations": (
            "How uncertain numbers are",
            "Right of the dashed line an interval is too wide, and a number that is not out of distribution is "
            "uncertain.",
        ),
        "roc": TEXTS["roc"],
        "predictions": ("Predicted and true numbers", "A point is an image; on the diagonal its number is right."),
        "coverage": (
            "Do intervals hold?",
            "On the diagonal, 80 % of the intervals with coverage 80 % contain the true number; below it intervals are "
            "too narrow. On validation images the stated ones lie there by construction; see whether they do on test "
            "images.",
        ),
        "error-coverage": (
            "Does the uncertainty know?",
            "RMSE when the numbers with the largest predicted deviation are left to a person; it should rise to the "
            "right.",
        ),
    }
    no_limit: ClassVar = {"deviations": "No width is too wide for an interval, so no number is uncertain."}
    columns: ClassVar = {"rmse": "RMSE", "r2": "R²", "nll": "NLL, nats", "crps": "CRPS"}
    recorded: ClassVar = {"rmse": "rmse", "r2": "r2", "nll": "nll_nats", "crps": "crps"}
    glossary: ClassVar = {
        "bin": "Numbers between two quantiles of the training images; bins take the place of classes.",
        **GLOSSARY,
        "check": "A value with its own p-value: texture (early layer), content (chosen layer).",
        "R²": "Fraction of the variance of the numbers that is explained: 1 is perfect, 0 no better than their mean.",
        "NC4": "How often the nearest bin mean is that of the number's bin, on validation images.",
        "interval": "Contains the true number with the nominal coverage, on images like the calibration images.",
        "predicted deviation": (
            "Standard deviation that a prediction gives itself: noise, and what more data would remove."
        ),
        "RMSE": "Root mean squared error, in the unit of the number.",
        "NLL": "Mean of −log(predicted density of the true number); lower is better. Nats.",
        "CRPS": "Mean distance of the predicted distribution from the true number, in its unit; lower is better.",
    }
    wrong = "have a number outside of their interval"
    test_images = "images/test.csv"

    def scored_set(self, name: str, role: Role, data: ImageDataset, scored: ScoredNumbers) -> RegressionSet:
        """Return the data that reports keep of the scores of ``data``; true numbers of OOD images are dropped."""
        values = data.values if role.is_known else None
        return RegressionSet(
            name,
            role,
            scored.ood_score,
            scored.mean,
            scored.deviation,
            torch.empty(0, dtype=torch.float64) if values is None else values,
            quality={} if values is None else RegressionEvaluator().quality_of(scored, data),
            groups=parts_of(data),
        )

    def synthetic_set(self, name: str, model: PSCRegressor, packed: Float[Tensor, "n columns"]) -> RegressionSet:
        scored, none = numbers_of(model, packed), torch.empty(0, dtype=torch.float64)
        return RegressionSet(name, Role.SYNTHETIC, scored.ood_score, scored.mean, scored.deviation, none)

    def limits_of(self, policy: RegressionPolicy, calibration: RegressionCalibration) -> dict[str, float | None]:
        width = policy.max_width
        return {"deviations": None if width is None else width / 2 / calibration.quantile(policy.coverage)}

    def judge(
        self, images: RegressionSet, policy: RegressionPolicy, calibration: RegressionCalibration
    ) -> tuple[Bool[Tensor, " n"], Bool[Tensor, " n"]]:
        half = calibration.quantile(policy.coverage) * images.deviation.double()
        lower, upper = map(torch.from_numpy, ends(images.mean.numpy(), half.numpy()))
        widest = math.inf if policy.max_width is None else policy.max_width
        return ~(upper - lower <= widest), (images.values < lower) | (images.values > upper)

    def policy_lines(self, task: Regression, policy: RegressionPolicy, limits: Mapping[str, float | None]) -> list[str]:
        widest = "" if policy.max_width is None else f"{policy.max_width:g} {task.target.unit}".rstrip()
        return [
            f"intervals contain the true number of at least {policy.coverage:.1%} of images like the calibration "
            "images",
            f"uncertain: an interval wider than {widest}" if widest else "no interval is too wide",
        ]

    def accuracy_lost(self, base: Mapping[str, float], psc: Mapping[str, float]) -> str:
        grown = psc["rmse"] / base["rmse"] - 1 if base.get("rmse") else 0
        return f"{grown:.0%} of its RMSE" if grown > RMSE_LOSS else ""

    def draw(self, facts: Facts) -> Figures:
        sets, target = facts.content.sets, cast(Regression, facts.manifest.task).target
        last, unit = facts.measured, f", {target.unit}" if target.unit else ""
        found: Figures = {
            "deviations": scores(sets, "deviation", f"predicted deviation{unit}", facts.limits["deviations"])
        }
        if isinstance(last, RegressionSet):
            found |= {
                "predictions": predictions(last, target),
                "coverage": coverage(last, cast(RegressionCalibration, facts.calibration)),
                "error-coverage": error_coverage(last, target),
            }
        return found
