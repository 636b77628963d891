"""The check ``reviewed``: how much more an image is like images that people reviewed as none of the classes.

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

Shapes: B images, P components, J kinds, D features.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar, Final, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from psc_core import linalg
from psc_core.checks import REVIEWED
from psc_core.data.dataset import ImageDataset
from psc_core.density import Density, Extended, class_covariances, class_proportions
from psc_core.errors import UsageError
from psc_core.fitted import Fitted
from psc_core.heads.base import CONSTANT_COLUMN
from psc_core.stored_images import StoredImages, shrink

FEWEST: Final = 10  # images of a kind
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
        silhouette = float(((others - own) / torch.maximum(others, own).clamp(min=1e-12)).mean())
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
