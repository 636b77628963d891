"""The data that a classifier's report keeps of a set of images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from jaxtyping import Bool, Float, Int, UInt8
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn import functional

from psc_core.answers import ClassificationPolicy
from psc_core.data.dataset import ImageDataset
from psc_core.evaluation.classification import ClassificationEvaluator, ScoredImages
from psc_core.evaluation.evaluate import PRIMARY
from psc_core.metrics import ECE_BINS
from psc_core.model import PSC
from psc_core.report.content import (
    GLOSSARY,
    NO_CLASS,
    PREDICTORS,
    TEXTS,
    Facts,
    Picture,
    Role,
    ScoredSet,
    TaskReport,
    parts_of,
)
from psc_core.report.page import KNOWN, LIMIT, UNKNOWN, Figures, axes_of, scores
from psc_core.tasks.classification import Calibration, Classification

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


LOSS: Final = 0.01  # the loss of accuracy, compared to the original network's, above which a warning is given
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
        wrong = ~images.correct[name][confidence.argsort(descending=True, stable=True)]
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
    test_images = "images/test"

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

    def limits_of(
        self, policy: ClassificationPolicy, calibration: Calibration, metrics: Mapping[str, Any]
    ) -> dict[str, float | None]:
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
        return f"{lost:.3f}" if lost > LOSS else ""

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

    def warnings_of(self, metrics: Mapping[str, Any], head: Mapping[str, float]) -> list[str]:
        above, error = head.get("nll_above_own", 0.0), head.get("nll_above_own_error", 0.0)
        served = (
            "the network's own probabilities are served, divided by a temperature: the NLL of the head's is "
            f"{above:.3f} ± {error:.3f} nats higher on validation images; --predictions psc serves the head's"
        )
        return [served] if above > error else []
