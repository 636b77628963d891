"""How good are probabilities, rankings and rejections?  Pure functions, float64, exact under ties.

Conventions
    probabilities  (n, K), rows sum to one; labels (n,) class indices.
    confidence     (n,) in [0, 1], usually max_c p_c; correct (n,) whether the arg max is the label.
    in_scores, out_scores   (n,), (m,): an out-of-distribution score (higher = more OOD) of the
        in-distribution and of the out-of-distribution images.  OOD is the positive class, as in OpenOOD v1.5.

Ties.  No result depends on the order of its input.  Thresholds only fall between distinct values (AUPR, FPR95,
coverage at risk); ranks are averaged (AUROC); AURC, AUGRC and adaptive ECE give each member of a group of
equal confidence the group's mean error, the expectation under random order.

An empty input, inputs of different lengths and NaN raise :class:`~psc_core.errors.UsageError`;
infinite scores are ordered like any other.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.errors import UsageError

ECE_BINS = 15
"""Bins of both calibration errors, as in Guo et al. (2017)."""

LOG_FLOOR = float(torch.finfo(torch.float32).tiny)
"""Probabilities below the smallest normal float32 count as this one: a zero costs 87.3 nats, not infinity."""


def _checked(name: str, *vectors: Tensor) -> None:
    lengths = [len(vector) for vector in vectors]
    if min(lengths) == 0:
        raise UsageError(f"{name}: expected at least one value in each input, got lengths {lengths}")
    if any(bool(vector.isnan().any()) for vector in vectors):
        raise UsageError(f"{name}: expected numbers, got NaN; look for images whose scores are not finite")


def _same_length(name: str, first: Tensor, second: Tensor) -> None:
    _checked(name, first, second)
    if len(first) != len(second):
        raise UsageError(f"{name}: expected inputs of one length, got {len(first)} and {len(second)}")


# Probabilities against labels ---------------------------------------------------------------------------


def label_nll(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """−log p(label) of each row in nats, with :data:`LOG_FLOOR`."""
    _same_length("nll", probabilities, labels)
    return -probabilities.double().gather(1, labels[:, None]).squeeze(1).clamp_min(LOG_FLOOR).log()


def label_brier(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Σ_c (p_c − 1[c = label])² of each row, in [0, 2]."""
    _same_length("brier", probabilities, labels)
    p = probabilities.double()
    return (p.square().sum(1) - 2 * p.gather(1, labels[:, None]).squeeze(1) + 1).clamp_min(0)


def accuracy(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Share of rows whose most probable class is the label."""
    _same_length("accuracy", probabilities, labels)
    return float((probabilities.argmax(1) == labels).double().mean())


def nll(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean negative log-likelihood in nats."""
    return float(label_nll(probabilities, labels).mean())


def brier(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Mean Brier score in [0, 2]."""
    return float(label_brier(probabilities, labels).mean())


# Calibration ----------------------------------------------------------------------------------------------


def ece(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"], *, bins: int = ECE_BINS) -> float:
    """Expected calibration error over ``bins`` equal-width bins (a, b]; a confidence of 0 joins the first."""
    _same_length("ece", confidence, correct)
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    gap = confidence.double() - correct.double()
    return _binned_gap(gap, torch.bucketize(confidence.double(), edges), bins)


def adaptive_ece(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"], *, bins: int = ECE_BINS) -> float:
    """Calibration error over at most ``bins`` bins of equal mass in order of confidence (Nguyen & O'Connor 2015)."""
    _same_length("adaptive_ece", confidence, correct)
    gap = _by_confidence(confidence, confidence.double() - correct.double())
    bins = min(bins, len(gap))
    index = torch.arange(len(gap), device=gap.device) * bins // len(gap)
    return _binned_gap(gap, index, bins)


def _binned_gap(gap: Tensor, index: Tensor, bins: int) -> float:
    """Σ_b |Σ_{i in b} gap_i| / n: every bin weighted by its share of the data."""
    total = torch.zeros(bins, dtype=torch.float64, device=gap.device).index_add_(0, index, gap)
    return float(total.abs().sum() / len(gap))


def _by_confidence(confidence: Tensor, values: Tensor) -> Tensor:
    """``values`` (n,) from most to least confident, averaged within groups of equal confidence."""
    order = confidence.argsort(descending=True)
    size = _ties(confidence[order])
    group = torch.arange(len(size), device=values.device).repeat_interleave(size)
    total = torch.zeros(len(size), dtype=torch.float64, device=values.device)
    total.index_add_(0, group, values[order].double())
    means: Tensor = (total / size)[group]
    return means


def _ties(ordered: Tensor) -> Tensor:
    """Sizes of the runs of equal values."""
    starts = torch.cat([ordered.new_ones(1, dtype=torch.bool), ordered[1:] != ordered[:-1]]).nonzero().squeeze(1)
    return torch.cat([starts, starts.new_tensor([len(ordered)])]).diff()


# In-distribution against out-of-distribution --------------------------------------------------------------


def auroc(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """P(out > in) + ½ P(out = in): area under the ROC curve by mid-ranks, O((n + m) log n)."""
    _checked("auroc", in_scores, out_scores)
    return float(_placements(out_scores, in_scores).mean())


def _placements(values: Tensor, reference: Tensor) -> Tensor:
    """Share of ``reference`` below each value, equal ones counted half."""
    ordered = reference.sort().values
    below = torch.searchsorted(ordered, values, right=False)
    not_above = torch.searchsorted(ordered, values, right=True)
    return (below + not_above).double() / (2 * len(reference))


class Difference(NamedTuple):
    """AUROC of one score minus AUROC of another on the same images, and its standard error."""

    value: float
    standard_error: float


def auroc_difference(
    in_first: Float[Tensor, " n"],
    out_first: Float[Tensor, " m"],
    in_second: Float[Tensor, " n"],
    out_second: Float[Tensor, " m"],
) -> Difference:
    """Paired comparison of two scores by DeLong et al. (1988).

    The images of both scores are the same, in the same order.  With one image on a side its share of the
    variance is unknown and the standard error is infinite.
    """
    _same_length("auroc_difference", in_first, in_second)
    _same_length("auroc_difference", out_first, out_second)
    out_gap = _placements(out_first, in_first) - _placements(out_second, in_second)
    in_gap = _placements(in_second, out_second) - _placements(in_first, out_first)
    if min(len(in_gap), len(out_gap)) == 1:
        return Difference(float(out_gap.mean()), math.inf)
    variance = out_gap.var() / len(out_gap) + in_gap.var() / len(in_gap)
    return Difference(float(out_gap.mean()), math.sqrt(float(variance)))


def aupr(positive: Float[Tensor, " p"], negative: Float[Tensor, " q"]) -> float:
    """Average precision Σ (R_t − R_{t−1}) P_t over distinct thresholds, higher scores being positive."""
    _checked("aupr", positive, negative)
    scores, order = torch.cat([positive, negative]).sort(descending=True)
    ends = _ties(scores).cumsum(0)
    hits = (order < len(positive)).cumsum(0)[ends - 1].double()
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / ends).sum() / len(positive))


def aupr_out(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Average precision with OOD images as positives."""
    return aupr(out_scores, in_scores)


def aupr_in(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Average precision with in-distribution images as positives."""
    return aupr(-in_scores, -out_scores)


def fpr95(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"], *, recall: float = 0.95) -> float:
    """Share of in-distribution images rejected by the strictest threshold that catches ``recall`` of the OOD ones."""
    _checked("fpr95", in_scores, out_scores)
    caught = max(1, math.ceil(recall * len(out_scores) - 1e-9))
    threshold = out_scores.sort(descending=True).values[caught - 1]
    return float((in_scores >= threshold).double().mean())


# Selective classification ---------------------------------------------------------------------------------


def aurc(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Area under the risk–coverage curve, 1/n Σ_k (errors among the k most confident)/k (Geifman et al. 2019)."""
    _same_length("aurc", confidence, correct)
    errors = _by_confidence(confidence, ~correct).cumsum(0)
    return float((errors / torch.arange(1, len(errors) + 1, device=errors.device)).mean())


def augrc(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Area under the generalised risk–coverage curve: the mean risk of a silent failure (Traub et al. 2024).

    Trapezoids under P(wrong and accepted) over coverage, which equals
    (1 − AUROC_f)·acc·(1 − acc) + ½ (1 − acc)², AUROC_f ranking correct above wrong.
    """
    _same_length("augrc", confidence, correct)
    errors = _by_confidence(confidence, ~correct).cumsum(0)
    return float((errors.sum() - errors[-1] / 2) / len(errors) ** 2)


def coverage_at_risk(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"], risk: float) -> float:
    """Largest share of rows that some confidence threshold accepts with an error rate ≤ ``risk``; 0 if none does."""
    _same_length("coverage_at_risk", confidence, correct)
    values, order = confidence.sort(descending=True)
    accepted = _ties(values).cumsum(0)
    errors = (~correct[order]).cumsum(0)[accepted - 1]
    allowed = errors.double() <= risk * accepted + 1e-9
    return float(accepted[allowed].max()) / len(confidence) if bool(allowed.any()) else 0.0
