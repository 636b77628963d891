"""Draw the figures that only a classifier's report has; see :mod:`psc_core.report.figures` for the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from psc_core.metrics import ECE_BINS
from psc_core.report import words
from psc_core.report.classification.sets import ClassificationSet
from psc_core.report.facts import Facts
from psc_core.report.figures import KNOWN, LIMIT, Figures, axes_of, scores

MAX_CONFUSED: Final = 20
"""Maximum number of classes in the confusion matrix, those with the most errors."""


def draw(facts: Facts) -> Figures:
    sets, limit, last = facts.content.sets, facts.limits["entropies"], facts.measured
    found: Figures = {"entropies": scores(sets, "entropy", "predictive entropy, nats", limit)}
    if isinstance(last, ClassificationSet):
        found |= {
            "reliability": reliability(last),
            "risk-coverage": risk_coverage(last),
            "confusion": confusion(last, facts.manifest.classes),
        }
    return found


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
        axis.plot(x, y, "o-", ms=3, lw=1, label=words.PREDICTORS.get(name, name), color=_colour(name))
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
        axis.plot(
            (accepted / len(wrong)).numpy(),
            risk.numpy(),
            lw=1,
            label=words.PREDICTORS.get(name, name),
            color=_colour(name),
        )
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
    for row, column in ((shown >= 0.005) & (shown < 0.995)).nonzero().tolist():
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
    return {"base": LIMIT, "psc": KNOWN}.get(classifier)
