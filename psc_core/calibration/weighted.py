"""Weighted conformal calibration, for images of one population that were drawn with different probabilities.

Image i of n was drawn with probability π_i, so it stands for ``w_i = 1 / π_i`` images.  The p-value of a new image with
score s, in the original population, is

    ``p(s) = (w* + Σ_{s_i ≥ s} w_i) / (w* + Σ_i w_i)``,   w* = max_i w_i

(weighted conformal prediction: Tibshirani et al. 2019, Corollary 1).  The weight of the new image is unknown; the
largest weight makes p largest, so the rate is guaranteed.  A calibration holds scores that count equally, so n weighted
scores are stored as ``m = ⌊Σ w_i / w*⌋`` equal ones: among them ``(1 + #{kept ≥ s}) / (m + 1)`` is p(s) rounded up to
the next multiple of 1 / (m + 1).  With equal weights they are the n scores themselves.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.errors import UsageError
from psc_core.rates import RANK_ROUNDING


def effective_count(weights: Float[Tensor, " n"]) -> int:
    """Return m, the number of equally weighted images that count as much as the weighted ones.

    Raises:
        UsageError: If there are no weights, or one is not positive and finite.
    """
    if not len(weights) or not (weights.isfinite() & (weights > 0)).all():
        raise UsageError("expected a positive finite weight for each of at least one image; give 1 / its probability")
    return int(float(relative(weights).sum()) + RANK_ROUNDING)


def relative(weights: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``w_i / w*``, float64; an empty tensor for no weights."""
    return weights.double() / float(weights.max()) if len(weights) else weights.double()


def equal_scores(scores: Float[Tensor, " n"], weights: Float[Tensor, " n"] | None) -> Int[Tensor, " m"]:
    """Return the positions of the m scores to keep, ascending by score; all of them if there are no weights.

    A high score is unusual.  A position may occur several times if weights differ.
    """
    if weights is None:
        return scores.argsort(stable=True)
    kept, order = effective_count(weights), scores.argsort(descending=True, stable=True)
    sums = relative(weights)[order].cumsum(0)
    ranks = (1 + sums) * ((kept + 1) / (1 + float(sums[-1])))  # (m + 1) p of each score
    above = torch.searchsorted(ranks, torch.arange(1, kept + 1, dtype=ranks.dtype), right=True)
    return order[above.clamp(max=len(order) - 1)].flip(0)


def thinned(weights: Float[Tensor, " n"]) -> Bool[Tensor, " n"]:
    """Draw images that count equally, each with probability ``w_i / w*``, for methods that need independent images.

    If all weights are equal, every image is drawn.
    """
    drawn = torch.rand(len(weights), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return drawn < relative(weights)
