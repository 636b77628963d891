"""The base of all heads (the paper's g′): from features to what a model predicts.

Heads are fitted to ``φ = (z − center) · inverse_scale`` of unit variance in every column, measured on the training
features, so that priors and length-scales mean the same whatever the units of z; a head stores how to make φ.  A column
that is constant in training is divided by the largest deviation of any column, so that a later change counts as one.

Shapes: B images, D = dim of z, K probabilities (0 for a task without them).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core import linalg
from psc_core.answers import CLASSIFICATION_SCORES, REGRESSION_SCORES
from psc_core.checks import CONFIDENCE
from psc_core.errors import FitError
from psc_core.features import FeatureMatrix, as_matrix, blocks
from psc_core.fitted import Fitted


class Scored(NamedTuple):
    """The results for a batch without calibration."""

    scores: Mapping[str, Float[Tensor, " batch"]]  # each in the unit that its task's answer declares
    probabilities: Float[Tensor, "batch classes"]

    def at(self, kept: Tensor) -> Scored:
        """Return the results for some images: their positions, or a mask."""
        return Scored({name: values[kept] for name, values in self.scores.items()}, self.probabilities[kept])

    @staticmethod
    def joined(parts: Sequence[Scored]) -> Scored:
        """Return the results for several batches as one."""
        scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
        return Scored(scores, torch.cat([part.probabilities for part in parts]))

    def to(self, device: torch.device | str) -> Scored:
        return Scored({name: values.to(device) for name, values in self.scores.items()}, self.probabilities.to(device))


class Head(Fitted):
    """A fitted module that turns features, or the network's own output, into scores."""

    score_names: ClassVar[tuple[str, ...]]  # of the task, in the order of their columns
    reads_output: ClassVar[bool] = False  # the network's own output, and no features
    reads_layers: ClassVar[bool] = False  # earlier layers besides z, averaged over positions
    has_temperature: ClassVar[bool] = False  # whether it has a temperature that can be chosen again
    epistemic_unit: ClassVar[str] = ""  # unit of the epistemic uncertainty, for display; empty where there is none

    def standardise(self, z: Float[Tensor, "batch dim"]) -> Float[Tensor, "batch dim"]:
        """Return φ, the standardised features."""
        return (z - self.center) * self.inverse_scale

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        """Return the scores that need no density, and the probabilities."""
        raise NotImplementedError

    def refit_temperature(self, probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Head:
        """Return the head with its temperature chosen again, by its probabilities of images that do not calibrate."""
        return self

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        """Return arrays that explain its predictions by name, images first; none by default."""
        return {}


CONSTANT_COLUMN: Final = 1e-6  # a column's standard deviation, of the largest of its layer, below which it is constant


class Standardisation(NamedTuple):
    """Mean and reciprocal standard deviation of each column, float64; every head stores both."""

    center: Float[Tensor, " dim"]
    inverse_scale: Float[Tensor, " dim"]

    def __call__(self, z: Float[Tensor, "n dim"] | FeatureMatrix) -> FeatureMatrix:
        """Return φ as float64, computed when it is read: memory does not grow with the images."""
        return as_matrix(z).map(
            lambda part: part.to(torch.float64, copy=True).sub_(self.center).mul_(self.inverse_scale),
            z.shape[1],
            torch.float64,
        )


def in_memory(features: FeatureMatrix) -> Float[Tensor, "n dim"]:
    """Return the whole matrix as one float32 tensor."""
    whole = torch.empty(features.shape, device=features.device)
    for chunk, block in blocks(features):
        whole[chunk] = block
    return whole


def fit_standardisation(
    z: Float[Tensor, "n dim"] | FeatureMatrix, widths: Sequence[int] | None = None
) -> Standardisation:
    """Return the means and reciprocal standard deviations of the columns."""
    center = linalg.mean_of_rows(z)
    squares = torch.zeros_like(center)
    for _, block in blocks(z):
        squares += (block.double() - center).square().sum(0)
    deviation = (squares / len(z)).sqrt()
    split = [len(center)] if widths is None else [*widths]
    largest = torch.cat([layer.max().expand(len(layer)) for layer in torch.split(deviation, split)])
    sizes = torch.cat([linalg.sizes_of(layer) for layer in torch.split(center, split)])
    varies = (deviation > CONSTANT_COLUMN * largest) & (deviation > linalg.rounding_of(sizes, z.dtype))
    if not varies.any():
        raise FitError(
            "expected features that differ between images, all are equal up to rounding; choose another layer"
        )
    return Standardisation(center, torch.where(varies, deviation, deviation.max()).reciprocal())


class ClassifierOutput(NamedTuple):
    """Predictions of a batch."""

    probabilities: Float[Tensor, "batch classes"]  # of each class; they sum to 1
    epistemic: Float[Tensor, " batch"]  # what more training data would remove, in the head's epistemic_unit


class UncertaintyDecomposition(NamedTuple):
    """The two parts of the predictive entropy, nats: neither is negative, and their sum is the served entropy."""

    aleatoric: Float[Tensor, " batch"]  # ambiguity of the image itself
    epistemic: Float[Tensor, " batch"]  # the rest, which more training data would remove


class ClassifierHead(Head):
    """Base of a classifier's heads; subclasses add ``layout``, ``epistemic_unit``, ``fit`` and ``forward``.

    ``forward`` maps features to a :class:`ClassifierOutput`.
    """

    score_names = CLASSIFICATION_SCORES

    @classmethod
    def fit(cls, data: ClassifierData) -> ClassifierHead:
        """Return a head fitted to standardised features; every free number by the NLL of the selection split."""
        raise NotImplementedError

    def decompose(self, z: Float[Tensor, "batch dim"]) -> UncertaintyDecomposition:
        """Return the two parts of the predictive entropy; all of it is aleatoric for a head without a posterior."""
        total = entropy(self(z).probabilities)
        return UncertaintyDecomposition(total, torch.zeros_like(total))

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        return score_classes(*self(features))

    def explain(self, features: Float[Tensor, "batch dim"]) -> dict[str, Tensor]:
        return dict(self.decompose(features)._asdict())


def score_classes(
    probabilities: Float[Tensor, "batch classes"],
    epistemic: Float[Tensor, " batch"],
    entropies: Float[Tensor, " batch"] | None = None,
) -> Scored:
    """Return the scores of a classifier except the density's, and what the check ``confidence`` reads.

    The entropies of the probabilities are computed unless they are given.
    """
    entropies = entropy(probabilities) if entropies is None else entropies
    scores = {"predictive_entropy": entropies, "epistemic": epistemic, CONFIDENCE: other_classes(probabilities)}
    return Scored(scores, probabilities)


PROBABLE_CLASSES: Final = 10  # whose probabilities the check ``confidence`` reads
POWER: Final = 0.2  # to which it raises them


def other_classes(probabilities: Float[Tensor, "batch classes"]) -> Float[Tensor, " batch"]:
    """Return ``Σ p^0.2`` over the second to the tenth most probable class: high where no class stands out.

    It is the generalised entropy of Liu, Lochman & Zach 2023, ``Σ p^γ (1 − p)^γ``, without 1 − p, which cancels.
    """
    most = probabilities.topk(min(PROBABLE_CLASSES, probabilities.shape[1]), dim=1).values
    return most[:, 1:].pow(POWER).sum(dim=1)


def entropy(probabilities: Float[Tensor, "*batch classes"]) -> Float[Tensor, "*batch"]:
    """Return ``−Σ_k p_k log p_k`` in nats, 0 log 0 = 0."""
    return cast(Tensor, torch.special.entr(probabilities)).sum(dim=-1)


class RegressionOutput(NamedTuple):
    """Predictions of a batch, all in the target's unit."""

    mean: Float[Tensor, " batch"]
    aleatoric: Float[Tensor, " batch"]  # standard deviation of the noise
    epistemic: Float[Tensor, " batch"]  # standard deviation that more training data would remove


class RegressionHead(Head):
    """Base of a regression's heads; ``forward`` of a subclass maps features to a :class:`RegressionOutput`."""

    score_names = REGRESSION_SCORES

    @classmethod
    def fit(cls, data: RegressionData) -> RegressionHead:
        """Return a head fitted to standardised features and numbers."""
        raise NotImplementedError

    def score(self, features: Float[Tensor, "batch dim"], output: Float[Tensor, "batch outputs"] | None) -> Scored:
        mean, aleatoric, epistemic = self(features)
        served = mean if output is None else output[:, 0]
        return Scored({"mean": served, "aleatoric": aleatoric, "epistemic": epistemic}, mean[:, None][:, :0])


class ClassifierData(NamedTuple):
    """What the head of a classifier is fitted to; the selection split chooses its free numbers."""

    train: FeatureMatrix  # standardised, float64
    train_labels: Int[Tensor, " n"]
    weights: Float[Tensor, " n"]  # 1 / labels of its image, so that every image is one observation
    selection: Float[Tensor, "m dim"]  # standardised, float32
    selection_labels: Int[Tensor, " m"]
    num_classes: int
    seed: int
    standardisation: Standardisation


class RegressionData(NamedTuple):
    """What the head of a regression is fitted to, all float64: (y − center) / scale has mean 0, deviation 1."""

    train: FeatureMatrix  # standardised
    train_values: Float[Tensor, " n"]
    train_images: Int[Tensor, " n"]  # which image of the training data each one is
    selection: Float[Tensor, "m dim"]  # standardised
    selection_values: Float[Tensor, " m"]
    selection_mean: Float[Tensor, " m"] | None  # what is served in place of the head's mean
    center: Float[Tensor, ""]  # target's unit
    scale: Float[Tensor, ""]
    widths: tuple[int, ...]  # columns of z, then of each earlier layer
    seed: int
    standardisation: Standardisation


class Features(NamedTuple):
    """The features of n labelled examples, ordered by class, on disk."""

    head_input: FeatureMatrix  # z, followed by the other layers that the head reads
    density_input: FeatureMatrix  # z, or the chosen layer averaged over positions
    texture: Mapping[str, FeatureMatrix]  # early layers averaged over positions
    labels: Int[Tensor, " n"]  # class indices, ascending
    images: Int[Tensor, " n"]  # which image of the data set each one shows
    classes: Sequence[str]  # names
    widths: tuple[int, ...]  # columns of z, and of each other layer in head_input
    values: Float[Tensor, " n"] | None = None  # number of each, of a regression, target's unit
    network_output: FeatureMatrix | None = None  # as it was trained, if this may be served
