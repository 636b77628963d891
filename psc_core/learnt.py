"""What a fitted model learns from images that people labelled: the check ``reviewed``, and added classes.

Nothing is fitted again.  w are the coordinates of the density, in which the covariance within the classes is the
identity.

**The check reviewed** says how much more an image is like images that people reviewed as none of the classes.
Of each kind of such images there is one direction d in the coordinates w of the density, and

    ``r = maxⱼ (w · dⱼ − oⱼ)``        in standard deviations of images of the classes

With the mean ``m̄`` and the covariance T of all images of the classes, and the mean ``ū`` of the n images of a kind,

    ``d ∝ (T + λ M)⁻¹ (ū − m̄)``,  ``λ = 1 + 50 / n``

is Fisher's discriminant between the two, with a ridge in the features' own units: M is the metric for which
``‖d‖²_M`` is the squared length of the weights on features of unit variance.  Few images are therefore shrunk hard,
towards the difference of the means.  (λ chosen by cross-validation followed the noise of ten images and was no better
for four hundred; NOTES.)  ``m̄`` and T follow from the moments that every density keeps, so nothing else is stored:
``T = Σ_k π_k (Σ_k + (m_k − m̄)(m_k − m̄)ᵀ)``, and M from ``basis``, which turns features into w.

The values that its p_g is fitted to are those of images drawn from the density's Gaussians, moved to where a few images
of the classes lie now (:func:`psc_core.density.class_values`).  The check counts only below a p-value of 0.03: alone it
is blind to kinds that nobody has reviewed, and whatever it adds to images of the classes would hide them.

**An added class** is made from images that people gave its name.  The density gets one more class
(:func:`psc_core.density.widen_density`), whose mean m tells the new class from the K before it:

    ``s = a (g(m) − logsumexp_k g(m_k)) + b``,   ``g(m) = w · m − ½ ‖m‖²``

are the log odds of a linear discriminant that an image shows the added class.  With ``q = σ(s)`` the probabilities
become ``((1 − q) p, q)``, whatever head gave p, so the classes before keep their odds.  A class that is added later
counts those added before it among the K.

a and b come from a logistic regression (Platt 1999, with his targets), where the added class weighs as much as an
average class, between its images, each held back once from the mean, and :data:`DRAWN` drawn from the density of the
classes before.  (A few real images would leave every image in doubt.)  Then b falls until the answer changes for at
most :data:`LARGEST_TAKEN` of real images of the classes before that were answered rightly.

Shapes: B images, P components, D features; J kinds of reviewed images; K classes before, J added ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Final, NamedTuple, cast

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.checks import REVIEWED
from psc_core.data.dataset import ImageDataset
from psc_core.density import (
    Density,
    Extended,
    class_covariances,
    class_proportions,
    class_values,
    draw_images,
)
from psc_core.errors import UsageError
from psc_core.fitted import Fitted
from psc_core.heads.base import CONSTANT_COLUMN, Scored, score_classes
from psc_core.stored_images import StoredImages, shrink

FEWEST: Final = 10  # images of a kind, or of an added class
STORED: Final = 12  # pictures of each kind that a bundle with stored images keeps
SHRINKAGE: Final = (1.0, 50.0)  # λ for many images, and times 1 / n what few add


class Kind(NamedTuple):
    """A kind of reviewed images."""

    name: str  # that people gave it
    images: int
    day: str | None  # on which most of them were logged, YYYY-MM-DD


class Moments(NamedTuple):
    """Those of all images of the classes, in w."""

    mean: Float[Tensor, " P"]
    covariance: Float[Tensor, "P P"]
    metric: Float[Tensor, "P P"]  # M


class Reviewed(Fitted):
    """The directions of all kinds, with what a bundle says of each."""

    kind = REVIEWED
    layout: ClassVar = {"directions": ("kept", "kinds"), "offsets": ("kinds",)}
    in_float64: ClassVar[frozenset[str]] = frozenset(layout)  # as w, so that no value depends on the batch

    def __init__(
        self,
        directions: Float[Tensor, "P J"],
        offsets: Float[Tensor, " J"],
        kinds: Sequence[Kind],
        stored_images: StoredImages | None = None,  # some of the reviewed images, whose labels are their kinds
    ) -> None:
        super().__init__({"directions": directions, "offsets": offsets}, record={})
        self.kinds, self.stored_images = tuple(kinds), stored_images

    def forward(self, w: Float[Tensor, "batch P"]) -> Float[Tensor, "batch J"]:
        """Return the value of each kind."""
        return (w.to(self.directions.dtype) @ self.directions - self.offsets).float()

    def largest(self, w: Float[Tensor, "batch P"]) -> Float[Tensor, " batch"]:
        """Return the value of the check."""
        values: Tensor = self(w)
        return values.amax(1)

    def moved(self, to: Extended) -> Reviewed:
        """Return the same check in the coordinates of an extended density."""
        images = None if self.stored_images is None else self.stored_images.moved(to.moved)
        directions = torch.linalg.solve(to.turn, self.directions)
        return Reviewed(directions, self.offsets - to.offset @ self.directions, self.kinds, images)


def fit_reviewed(
    density: Density | Moments,
    w: Float[Tensor, "n P"],
    kinds: Int[Tensor, " n"],
    names: Sequence[str],
    days: Sequence[str] = (),
) -> Reviewed:
    """Fit the check to the coordinates of reviewed images; ``kinds`` are positions in ``names``."""
    mean, covariance, metric = density if isinstance(density, Moments) else moments_of(density)
    directions, found = [], []
    for kind in sorted({*kinds.tolist()}):
        of_kind = (kinds == kind).nonzero()[:, 0]
        many, few = SHRINKAGE
        ridge = covariance + (many + few / len(of_kind)) * metric
        direction = torch.linalg.solve(ridge, w[of_kind].double().mean(0) - mean)
        directions.append(direction / (direction @ covariance @ direction).sqrt())
        day = Counter(days[at] for at in of_kind.tolist()).most_common(1)[0][0] if days else None
        found.append(Kind(names[kind], len(of_kind), day))
    together = torch.stack(directions, dim=1)
    return Reviewed(together, mean @ together, found)


def cluster(density: Density, w: Float[Tensor, "n P"]) -> Int[Tensor, " n"]:
    """Return the cluster of each image, from 0 and the largest first: Ward's, in features of unit variance.

    Their number, at most one for :data:`FEWEST` images, is that of the largest mean silhouette (Rousseeuw 1987); of
    fewer than two for which there are images enough, there is one.
    """
    from scipy.cluster.hierarchy import fcluster, linkage  # imported here, so that a service does not load it

    features = w.double() @ linalg.inverse_root(moments_of(density).metric).root
    apart, tree = torch.cdist(features, features), linkage(features.numpy(), "ward") if len(w) > 1 else None
    best, chosen = -1.0, torch.zeros(len(w), dtype=torch.int64)
    for count in range(2, len(w) // FEWEST + 1):
        labels = torch.from_numpy(fcluster(tree, count, "maxclust")).long() - 1
        members = functional.one_hot(labels).double()
        sums, sizes = apart @ members, members.sum(0)
        own = (sums * members).sum(1) / (sizes[labels] - 1).clamp(min=1)
        others = torch.where(members > 0, torch.inf, sums / sizes).amin(1)
        each = (others - own) / torch.maximum(others, own).clamp(min=1e-12)
        silhouette = float(torch.where(sizes[labels] > 1, each, 0).mean())  # of one alone it is 0
        if len(sizes) > 1 and silhouette > best:
            best, chosen = silhouette, sizes.argsort(descending=True, stable=True).argsort()[labels]
    return chosen


def store_images(reviewed: Reviewed, images: ImageDataset, w: Float[Tensor, "n P"]) -> Reviewed:
    """Return the check with small pictures of the reviewed images, :data:`STORED` of each kind."""
    labels, names = images.first_labels(), [kind.name for kind in reviewed.kinds]
    rows = [(labels == images.classes.index(name)).nonzero()[:STORED, 0] for name in names]
    few = images.subset(torch.cat(rows))
    tensors = {
        "embedding": w[torch.cat(rows)].float(),
        "pixels": torch.cat([shrink(few.preprocess.to_pixels(batch.images)) for batch in few.batches(STORED)]),
        "images": torch.cat(rows),
        "labels": torch.arange(len(rows)).repeat_interleave(torch.tensor([*map(len, rows)])),
    }
    return Reviewed(reviewed.directions, reviewed.offsets, reviewed.kinds, StoredImages(tensors))


def with_enough(images: ImageDataset) -> ImageDataset:
    """Return reviewed images, labelled with their kinds, where kinds of too few images are one, the first."""
    if len(images) < FEWEST:
        raise UsageError(
            f"{len(images)} images are reviewed as none of the classes, and the check needs {FEWEST}; review "
            f"{FEWEST - len(images)} more of them"
        )
    labels, kinds = images.first_labels(), len(images.classes)
    labels = torch.where(labels.bincount(minlength=kinds)[labels] < FEWEST, 0, labels)
    return replace(images, labels=labels)


def moments_of(density: Density) -> Moments:
    """Return what fits to a density have in common."""
    proportions, centres = class_proportions(density), density.get_buffer("centres")
    mean = proportions @ centres
    apart = centres - mean
    covariance = apart.T @ (proportions[:, None] * apart)
    for proportion, of_class in zip(proportions, class_covariances(density), strict=True):
        covariance += proportion * of_class
    return Moments(mean, covariance, _metric(density, covariance))


def _metric(density: Density, covariance: Float[Tensor, "P P"]) -> Float[Tensor, "P P"]:
    """Return M: a weight v on features of unit variance is ``d = R v`` in w, and the smallest such v has ``dᵀ M d``."""
    features = torch.linalg.pinv(density.get_buffer("basis"))  # (P, D): from w to features
    deviation = (features * (covariance @ features)).sum(0).clamp(min=0).sqrt()
    largest = deviation.max()
    scaled = features / torch.where(deviation > CONSTANT_COLUMN * largest, deviation, largest)
    return cast(Tensor, torch.linalg.inv(scaled @ scaled.T))


LARGEST_TAKEN: Final = 0.005  # fraction of the right answers that an added class may take
KEPT_BY: Final = 1e-5  # least log odds by which the others stay right: more than float32, which serves, rounds away
DRAWN: Final = 1000  # images
PARTS: Final = 5  # of the images that people named, each of which is held back once


class AddedClass(NamedTuple):
    """What a bundle says of an added class besides its name, which is the last of the classes."""

    images: int  # that the class was made from
    slope: float  # a
    bias: float  # b


def discriminant(w: Float[Tensor, "batch P"], means: Float[Tensor, "classes P"]) -> Float[Tensor, " batch"]:
    """Return ``g(m) − logsumexp_k g(m_k)``, m the last of the means."""
    of_class = w.to(means.dtype) @ means.T - 0.5 * means.square().sum(1)
    return of_class[:, -1] - of_class[:, :-1].logsumexp(1)


def log_odds(
    w: Float[Tensor, "batch P"], means: Float[Tensor, "classes P"], added: Sequence[AddedClass]
) -> Float[Tensor, "batch added"]:
    """Return s of each added class, whose means are the last."""
    before = len(means) - len(added)
    each = [one.slope * discriminant(w, means[: before + j + 1]) + one.bias for j, one in enumerate(added)]
    return torch.stack(each, dim=1).float()


def widen(scored: Scored, odds: Float[Tensor, "batch added"]) -> Scored:
    """Return the results with the added classes; the parts of all scores that belong to the head shrink with 1 − q."""
    scores, probabilities = scored
    epistemic = scores["epistemic"]
    for s in odds.T:
        q = s.sigmoid()
        probabilities = torch.cat([probabilities * (1 - q)[:, None], q[:, None]], dim=1)
        epistemic = epistemic * (1 - q)
    widened = score_classes(probabilities, epistemic)
    return Scored({**scores, **widened.scores}, probabilities)


def fit_added(
    name: str,
    density: Density,  # of the classes before, on the CPU
    new: Float[Tensor, "n P"],  # w of images of the class
    old: Float[Tensor, "m P"],  # w of images of the classes before that were answered rightly
    probabilities: Float[Tensor, "m K"],  # of these
) -> tuple[AddedClass, Float[Tensor, " n"], Float[Tensor, " m"]]:
    """Fit a and b; return them with the log odds of the images of the class, each held back once, and of the others."""
    from scipy import optimize  # imported here, so that a service does not load it

    means, n, w = density.get_buffer("centres"), len(new), new.double()
    part, held, spread = torch.arange(n) % PARTS, torch.empty(n).double(), w.var(0).sum()
    for each in range(PARTS):
        others = w[part != each]
        of_part = discriminant(w[part == each], torch.cat([means, others.mean(0)[None]]))
        held[part == each] = of_part + 0.5 * spread / len(others) - 0.5 * spread / n  # ‖m‖² of fewer images is larger
    wide = torch.cat([means, w.mean(0)[None]])
    real = discriminant(old, wide)
    drawn = draw_images(density, DRAWN)
    values = class_values(drawn, lambda w: discriminant(w, wide), real if len(real) else None).double()
    x = torch.cat([held, values])
    targets = torch.tensor([(n + 1) / (n + 2)] * n + [1 / (DRAWN + 2)] * DRAWN, dtype=torch.float64)
    weights = torch.tensor([1 / n] * n + [len(means) / DRAWN] * DRAWN, dtype=torch.float64)
    size = x.abs().max().clamp(min=1)

    def loss(at: npt.NDArray[Any]) -> float:
        s = at[0] * x / size + at[1]
        return float((weights * (functional.softplus(s) - targets * s)).sum())

    slope, bias = optimize.minimize(loss, [1.0, 0.0], method="BFGS").x.tolist()
    slope /= float(size)
    if slope <= 0:
        raise not_told_apart(name, n)
    margins = (slope * real - probabilities.double().amax(1).log()).sort(descending=True).values
    allowed = int(LARGEST_TAKEN * len(real))
    if len(margins) > allowed:
        bias = min(bias, -float(margins[allowed]) - KEPT_BY)
    return AddedClass(n, slope, bias), slope * held + bias, slope * real + bias


def not_told_apart(name: str, images: int) -> UsageError:
    """Return the error for images that make no class."""
    return UsageError(
        f"the model's features do not tell the {images} images of {name} from those of the classes; look at their "
        "labels, or fit the bundle again with them among the training images"
    )


def is_answer(s: Float[Tensor, " n"], probabilities: Float[Tensor, "n K"]) -> Bool[Tensor, " n"]:
    """Return whether images of these log odds are answered with the class rather than with one before."""
    return s > probabilities.double().amax(1).log()
