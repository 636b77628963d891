"""Measure a ranking score: AUROC with its paired comparison, average precision, FPR at 95 % recall; float64.

``in_scores`` (n,), ``out_scores`` (m,): an out-of-distribution score (higher = more OOD) of in-distribution and of
out-of-distribution images.  OOD is the positive class, as in OpenOOD v1.5.  See :mod:`.inputs` for ties and invalid
inputs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.metrics.inputs import check_same_length, check_values, tie_sizes
from psc_core.rates import tolerant_ceil


def auroc(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return P(out > in) + ½ P(out = in), the area under the ROC curve, by mid-ranks in O((n + m) log n)."""
    check_values("auroc", in_scores, out_scores)
    return float(placements(out_scores, in_scores).mean())


def placements(values: Float[Tensor, " n"], reference: Float[Tensor, " m"]) -> Float[Tensor, " n"]:
    """Return the fraction of ``reference`` below each value; equal values count half."""
    # searchsorted warns about values that are not contiguous.
    ordered, values = reference.sort().values, values.contiguous()
    below = torch.searchsorted(ordered, values, right=False)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above).double() / (2 * len(reference))


class Difference(NamedTuple):
    """The AUROC of one score minus the AUROC of another on the same images, with its standard error."""

    value: float
    standard_error: float


def auroc_difference(
    in_first: Float[Tensor, " n"],
    out_first: Float[Tensor, " m"],
    in_second: Float[Tensor, " n"],
    out_second: Float[Tensor, " m"],
) -> Difference:
    """Compare the AUROC of two scores on paired images, after DeLong et al. (1988).

    The images of both scores are the same, in the same order.  With a single image on one side, its contribution to the
    variance is unknown and the standard error is infinite.
    """
    check_same_length("auroc_difference", in_first, in_second)
    check_same_length("auroc_difference", out_first, out_second)
    out_gap = placements(out_first, in_first) - placements(out_second, in_second)
    in_gap = placements(in_second, out_second) - placements(in_first, out_first)
    if min(len(in_gap), len(out_gap)) == 1:
        return Difference(float(out_gap.mean()), math.inf)
    variance = out_gap.var() / len(out_gap) + in_gap.var() / len(in_gap)
    return Difference(float(out_gap.mean()), math.sqrt(float(variance)))


def aupr(positive: Float[Tensor, " p"], negative: Float[Tensor, " q"]) -> float:
    """Return the average precision Σ (R_t − R_{t−1}) P_t over distinct thresholds; higher scores are positive."""
    check_values("aupr", positive, negative)
    scores, order = torch.cat([positive, negative]).sort(descending=True)
    ends = tie_sizes(scores).cumsum(0)
    hits = (order < len(positive)).cumsum(0)[ends - 1].double()
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / ends).sum() / len(positive))


def fpr95(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return the fraction of in-distribution images at or above the threshold that catches 95 % of OOD images."""
    check_values("fpr95", in_scores, out_scores)
    caught = max(1, tolerant_ceil(0.95 * len(out_scores)))
    threshold = out_scores.sort(descending=True).values[caught - 1]
    return float((in_scores >= threshold).double().mean())
