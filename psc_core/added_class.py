"""A class that people added to a fitted classifier, from images that they gave its name.

Nothing is fitted again.  The density gets one more class (:func:`psc_core.density.widen_density`), whose mean m tells
the new class from the K before it.  In the coordinates w, where the covariance within the classes is the identity,

    ``s = a (g(m) − logsumexp_k g(m_k)) + b``,   ``g(m) = w · m − ½ ‖m‖²``

are the log odds of a linear discriminant that an image shows the added class.  With ``q = σ(s)`` the probabilities
become ``((1 − q) p, q)``, whatever head gave p, so the classes before keep their odds.  A class that is added later
counts those added before it among the K.

a and b come from a logistic regression (Platt 1999, with his targets), where the added class weighs as much as an
average class, between its images, each held back once from the mean, and :data:`DRAWN` drawn from the density of the
classes before.  (A few real images would leave every image in doubt.)  Then b falls until the answer changes for at
most :data:`LARGEST_TAKEN` of real images of the classes before that were answered rightly.

Shapes: B images, P components, K classes before, J added ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy.typing as npt
import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from psc_core.density import Density, class_values
from psc_core.errors import UsageError
from psc_core.heads.base import Scored, score_classes

LARGEST_TAKEN: Final = 0.005  # fraction of the right answers that an added class may take
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
    drawn = class_values(density, DRAWN, lambda w: discriminant(w, wide), real if len(real) else None).double()
    x = torch.cat([held, drawn])
    targets = torch.tensor([(n + 1) / (n + 2)] * n + [1 / (DRAWN + 2)] * DRAWN, dtype=torch.float64)
    weights = torch.tensor([1 / n] * n + [len(means) / DRAWN] * DRAWN, dtype=torch.float64)
    size = x.abs().max().clamp(min=1)

    def loss(at: npt.NDArray[Any]) -> float:
        s = at[0] * x / size + at[1]
        return float((weights * (functional.softplus(s) - targets * s)).sum())

    slope, bias = optimize.minimize(loss, [1.0, 0.0], method="BFGS").x.tolist()
    slope /= float(size)
    if slope <= 0:
        raise UsageError(
            f"the model's features do not tell the {n} images of {name} from those of the classes; look at their "
            "labels, or fit the bundle again with them among the training images"
        )
    margins = (slope * real - probabilities.double().amax(1).log()).sort(descending=True).values
    allowed = int(LARGEST_TAKEN * len(real))
    if len(margins) > allowed:
        bias = min(bias, -float(margins[allowed]))
    return AddedClass(n, slope, bias), slope * held + bias, slope * real + bias


def is_answer(s: Float[Tensor, " n"], probabilities: Float[Tensor, "n K"]) -> Bool[Tensor, " n"]:
    """Return whether images of these log odds are answered with the class rather than with one before."""
    return s > probabilities.double().amax(1).log()
