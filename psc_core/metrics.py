"""Metrics of classifiers, regressions and detectors, float64, and exact intervals for counts.

No metric depends on the order of its input.  Thresholds only lie between distinct values (AUPR, FPR95, coverage at
risk); ranks are averaged (AUROC); AURC, AUGRC and adaptive ECE give each member of a group of equal confidence the
group's mean error, which is the expectation under random order.  Empty inputs, inputs of different lengths and NaN
raise :class:`~psc_core.errors.UsageError`; infinite scores are ordered like any others.

``probabilities`` (n, K), rows sum to one; ``labels`` (n,) class indices; ``confidence`` (n,) in [0, 1], usually
max_c p_c; ``correct`` (n,) whether the arg max is the label.  ``in_scores`` (n,), ``out_scores`` (m,): an
out-of-distribution score (higher = more OOD) of in-distribution and of out-of-distribution images.  OOD is the positive
class, as in OpenOOD v1.5.

Intervals are central (each tail at most (1 − level) / 2), by :mod:`scipy.stats`, and answer five questions:

* :func:`binomial_interval`: which rates explain k of n?  Clopper–Pearson.
* :func:`weighted_interval`: the same for a sample whose members were drawn with different probabilities.
  Clopper–Pearson with the counts of an unweighted sample of the same precision (Korn and Graubard 1998).
* :func:`binomial_acceptance`: which counts k of n does a fixed rate α explain?
* :func:`calibrated_rate`: which true rates does a *calibrated* threshold have?  A conformal p-value is ≤ α exactly
  beyond the r-th most unusual of c calibration scores, r = ⌊α (c + 1)⌋; the true rate beyond it is random over
  calibration sets, Beta(r, c + 1 − r), with the mean r / (c + 1) ≤ α (Vovk 2012).
* :func:`beta_binomial_acceptance`: which counts does such a threshold explain?  For finite c this is wider than the
  binomial interval, because the calibration set itself is a sample.

A regression's forecast is the normal distribution N(μ, σ²) of the true number y:

    RMSE = √(mean (y − μ)²)
    R²   = 1 − Σ (y − μ)² / Σ (y − ȳ)²
    NLL  = mean ½ [((y − μ)/σ)² + log(2π σ²)]                                    nats
    CRPS = mean σ [w (2Φ(w) − 1) + 2φ(w) − 1/√π],   w = (y − μ)/σ               (Gneiting & Raftery 2007, equation 21)
"""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from psc_core.conformal import RANK_ROUNDING, ood_rank, tolerant_ceil
from psc_core.errors import UsageError
from psc_core.linalg import r_squared

GUESSING_DEVIATIONS: Final = 1.645  # above chance, which agreement exceeds for one in twenty random guesses


def check_values(name: str, *vectors: Tensor) -> None:
    """Raise :class:`UsageError`, which names the metric, if a vector is empty or has NaN."""
    lengths = [len(vector) for vector in vectors]
    if min(lengths) == 0:
        raise UsageError(f"{name}: expected at least one value in each input, got lengths {lengths}")
    if any(bool(vector.isnan().any()) for vector in vectors):
        raise UsageError(f"{name}: expected numbers, got NaN; look for images whose scores are not finite")


def check_same_length(name: str, *vectors: Tensor) -> None:
    check_values(name, *vectors)
    lengths = [len(vector) for vector in vectors]
    if len({*lengths}) > 1:
        raise UsageError(f"{name}: expected inputs of one length, got {' and '.join(map(str, lengths))}")


def by_confidence(confidence: Float[Tensor, " n"], values: Shaped[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return ``values`` from most to least confident, averaged within groups of equal confidence, float64."""
    order = confidence.argsort(descending=True)
    _, group, size = torch.unique_consecutive(confidence[order], return_inverse=True, return_counts=True)
    total = torch.zeros(len(size), dtype=torch.float64, device=values.device)
    total.index_add_(0, group, values[order].double())
    means: Tensor = (total / size)[group]
    return means


def tie_ends(ordered: Float[Tensor, " n"]) -> Int[Tensor, " groups"]:
    """Return where the runs of equal values end."""
    _, sizes = torch.unique_consecutive(ordered, return_counts=True)
    ends: Tensor = sizes.cumsum(0)
    return ends


ECE_BINS = 15  # the number of bins of both calibration errors, as in Guo et al. (2017).
# The smallest normal float32, to which probabilities are raised: a zero costs 87.3 nats, not infinity.
LOG_FLOOR = float(torch.finfo(torch.float32).tiny)


def label_nll(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return −log p(label) of each labelled example in nats, with :data:`LOG_FLOOR`."""
    check_same_length("nll", probabilities, labels)
    return -probabilities.double().gather(1, labels[:, None]).squeeze(1).clamp_min(LOG_FLOOR).log()


def label_brier(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return Σ_c (p_c − 1[c = label])² of each labelled example, in [0, 2]."""
    check_same_length("brier", probabilities, labels)
    p = probabilities.double()
    return (p.square().sum(1) - 2 * p.gather(1, labels[:, None]).squeeze(1) + 1).clamp_min(0)


def accuracy(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return the fraction of labelled examples whose most probable class is the label."""
    check_same_length("accuracy", probabilities, labels)
    return float((probabilities.argmax(1) == labels).double().mean())


def better_than_guessing(predicted: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> bool:
    """Return whether predictions agree with the labels more often than the same predictions in random order would.

    The number of agreements under a random order has the mean and variance of Hoeffding (1951), so a classifier that
    always predicts the most frequent class is guessing however often it is right.  Where all labels are equal nothing
    can be said, and the answer is yes.
    """
    check_same_length("better_than_guessing", predicted, labels)
    n = len(labels)
    _, (predicted, labels) = torch.unique(torch.stack([predicted, labels]), return_inverse=True)
    classes = int(torch.stack([predicted, labels]).max()) + 1
    if n < 2 or bool((labels == labels[0]).all()):
        return True
    p, q = (torch.bincount(each, minlength=classes).double() / n for each in (predicted, labels))
    excess = float((predicted == labels).sum()) - n * float(p @ q)
    # Σ_kl p_k q_l d_kl², where d_kl = 1[k = l] − q_k − p_l + p·q.
    same = float((p * q * ((1 - q - p + p @ q).square() - (p @ q - q - p).square())).sum())
    squares = same + float((p[:, None] * q * (p @ q - q[:, None] - p).square()).sum())
    return excess > GUESSING_DEVIATIONS * n * math.sqrt(squares / (n - 1)) + 1e-9 * n


def has_another_order(predicted: Int[Tensor, " n"], labels: Int[Tensor, " n"]) -> bool:
    """Return whether an order of classes chosen on half of the images makes most predictions for the others right.

    A classifier that always predicts the most frequent class is guessing in every order.
    """
    from scipy.optimize import linear_sum_assignment  # Imported here, so that a service does not load it.

    pairs = torch.stack([predicted, labels])[:, torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))]
    counts = np.zeros((int(pairs.max()) + 1,) * 2)
    np.add.at(counts, tuple(pairs[:, ::2].numpy()), 1)
    _, order = linear_sum_assignment(counts, maximize=True)
    reordered = torch.from_numpy(order)[pairs[0]]
    right = float((reordered == pairs[1])[1::2].double().mean())
    # A network that was never trained, but tells bright from dark, gets up to half of the way from chance to 1.
    return right >= 0.6 + 0.4 / len(counts) and better_than_guessing(reordered, pairs[1])


def nll(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    return float(label_nll(probabilities, labels).mean())


def ece(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Return the expected calibration error (Guo et al. 2017, equation 3).

    It has :data:`ECE_BINS` equal-width bins (a, b]; 0 is in the first bin.
    """
    check_same_length("ece", confidence, correct)
    edges = torch.linspace(0, 1, ECE_BINS + 1, dtype=torch.float64, device=confidence.device)[1:-1]
    gap = confidence.double() - correct.double()
    return binned_gap(gap, torch.bucketize(confidence.double(), edges), ECE_BINS)


def adaptive_ece(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Return the calibration error over :data:`ECE_BINS` bins of equal mass, or n if fewer (Nguyen & O'Connor 2015)."""
    check_same_length("adaptive_ece", confidence, correct)
    gap = by_confidence(confidence, confidence.double() - correct.double())
    bins = min(ECE_BINS, len(gap))
    index = torch.arange(len(gap), device=gap.device) * bins // len(gap)
    return binned_gap(gap, index, bins)


def binned_gap(gap: Float[Tensor, " n"], index: Int[Tensor, " n"], bins: int) -> float:
    """Return Σ_b |Σ_{i in b} gap_i| / n, in which each bin has the weight of its fraction of the data."""
    total = torch.zeros(bins, dtype=torch.float64, device=gap.device).index_add_(0, index, gap)
    return float(total.abs().sum() / len(gap))


class RateInterval(NamedTuple):
    low: float
    high: float


class CountInterval(NamedTuple):
    low: int
    high: int


def _stats() -> Any:
    from scipy import stats  # Imported here, so that a model that only predicts does not load it.

    return stats


def binomial_interval(successes: int, trials: int, *, level: float = 0.99) -> RateInterval:
    """Return the Clopper–Pearson interval of the rate behind ``successes`` of ``trials``."""
    interval = _stats().binomtest(successes, trials).proportion_ci(level, "exact")
    return RateInterval(float(interval.low), float(interval.high))


def weighted_interval(hits: npt.ArrayLike, weights: npt.NDArray[np.float64], *, level: float = 0.99) -> RateInterval:
    """Return the interval of the rate of hits (n,) in the population, with the inverse of each member's probability."""
    size = weights.sum() ** 2 / (weights**2).sum()  # n if all weights are equal
    count = size * float(weights @ np.asarray(hits, np.float64) / weights.sum())
    tail = (1 - level) / 2
    low = _stats().beta.ppf(tail, count, size - count + 1) if count > 0 else 0.0
    high = _stats().beta.ppf(1 - tail, count + 1, size - count) if count < size else 1.0
    return RateInterval(float(low), float(high))


def weighted_median(values: npt.NDArray[np.floating[Any]], weights: npt.NDArray[np.float64]) -> float:
    """Return the smallest value below or at which half of the weight lies."""
    order = np.argsort(values)
    cumulative = weights[order].cumsum()
    return float(values[order][np.searchsorted(cumulative, cumulative[-1] / 2)])


def binomial_acceptance(trials: int, alpha: float, *, level: float = 0.99) -> CountInterval:
    """Return the counts that ``trials`` draws at rate ``alpha`` give with probability ≥ ``level``."""
    return CountInterval(*map(int, _stats().binom(trials, alpha).interval(level)))


def calibrated_rate(alpha: float, calibration_size: int, *, level: float = 0.95) -> RateInterval:
    """Return the true rates of p ≤ ``alpha`` that thresholds from ``calibration_size`` scores have."""
    low, high = _stats().beta(*_beta_of(alpha, calibration_size)).interval(level)
    return RateInterval(float(low), float(high))


def in_practice(alpha: float, calibration_size: int) -> str:
    """Return :func:`calibrated_rate` as a phrase that follows "calibration images" and precedes the per cent sign."""
    return f"in practice, with {calibration_size} of them, {describe_range(alpha, calibration_size)}"


def describe_range(alpha: float, calibration_size: int) -> str:
    """Return :func:`calibrated_rate` in per cent, as "1 to 12"."""
    low, high = calibrated_rate(alpha, calibration_size)
    return f"{100 * low:.2g} to {100 * high:.2g}"


def beta_binomial_acceptance(trials: int, alpha: float, calibration_size: int, *, level: float = 0.99) -> CountInterval:
    """Return the counts of p ≤ ``alpha`` among ``trials`` if p comes from ``calibration_size`` scores."""
    return CountInterval(*map(int, _stats().betabinom(trials, *_beta_of(alpha, calibration_size)).interval(level)))


def _beta_of(alpha: float, calibration_size: int) -> tuple[int, int]:
    """Return r and c + 1 − r."""
    rank = ood_rank(alpha, calibration_size)
    if rank < 1:
        raise UsageError(
            f"expected alpha ≥ 1/{calibration_size + 1}, the smallest p-value {calibration_size} "
            f"calibration images can give, got {alpha}; calibrate on more images or raise alpha"
        )
    rank = min(rank, calibration_size)  # alpha within rounding of 1 gives rank c + 1
    return rank, calibration_size + 1 - rank


def auroc(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return P(out > in) + ½ P(out = in), the area under the ROC curve."""
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
    ends = tie_ends(scores)
    hits = (order < len(positive)).cumsum(0)[ends - 1].double()
    gained = hits.diff(prepend=hits.new_zeros(1))
    return float((gained * hits / ends).sum() / len(positive))


def fpr95(in_scores: Float[Tensor, " n"], out_scores: Float[Tensor, " m"]) -> float:
    """Return the fraction of in-distribution images at or above the threshold that catches 95 % of OOD images."""
    check_values("fpr95", in_scores, out_scores)
    caught = max(1, tolerant_ceil(0.95 * len(out_scores)))
    threshold = out_scores.sort(descending=True).values[caught - 1]
    return float((in_scores >= threshold).double().mean())


def rmse(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    check_same_length("rmse", mean, values)
    return float((values.double() - mean.double()).square().mean().sqrt())


def r2(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    check_same_length("r2", mean, values)
    return r_squared((values.double() - mean.double()).square(), values.double())


def rises_with(mean: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> bool:
    """Return whether predictions rise with the numbers more than in random order, by the correlation of their ranks.

    Under a random order it has mean 0 and variance 1 / (n − 1), and a few odd numbers hardly change it.  Where all
    numbers are equal nothing can be said, and the answer is yes.
    """
    if len(values) < 2 or bool((values == values[0]).all()):
        return True
    y, mu = (ranks - ranks.mean() for ranks in (_ranks(values), _ranks(mean)))
    scale = float(y.norm() * mu.norm())
    return scale > 0 and float(y @ mu) / scale > GUESSING_DEVIATIONS / math.sqrt(len(y) - 1)


def _ranks(values: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """Return the place of each value in ascending order; equal ones share their mean place."""
    _, which, counts = torch.unique(values, return_inverse=True, return_counts=True)
    places: Tensor = counts.cumsum(0).double() - (counts.double() - 1) / 2
    return places[which]


def gaussian_nll(mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    check_same_length("gaussian_nll", mean, deviation, values)
    w = (values.double() - mean.double()) / deviation.double()
    return float((0.5 * (w.square() + math.log(2 * math.pi)) + deviation.double().log()).mean())


def crps(mean: Float[Tensor, " n"], deviation: Float[Tensor, " n"], values: Float[Tensor, " n"]) -> float:
    check_same_length("crps", mean, deviation, values)
    sigma = deviation.double()
    w = (values.double() - mean.double()) / sigma
    density = torch.exp(-0.5 * w.square()) / math.sqrt(2 * math.pi)
    return float((sigma * (w * torch.erf(w / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def aurc(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Return the area under the risk–coverage curve, 1/n Σ_k (errors among the k most confident)/k."""
    check_same_length("aurc", confidence, correct)
    errors = by_confidence(confidence, ~correct).cumsum(0)
    return float((errors / torch.arange(1, len(errors) + 1, device=errors.device)).mean())


def augrc(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"]) -> float:
    """Return the area under the generalised risk–coverage curve: the mean risk of a silent failure (Traub et al. 2024).

    Trapezoids under P(wrong and accepted) over coverage equal (1 − AUROC_f)·acc·(1 − acc) + ½ (1 − acc)², where AUROC_f
    ranks correct predictions above wrong ones.
    """
    check_same_length("augrc", confidence, correct)
    errors = by_confidence(confidence, ~correct).cumsum(0)
    return float((errors.sum() - errors[-1] / 2) / len(errors) ** 2)


def coverage_at_risk(confidence: Float[Tensor, " n"], correct: Bool[Tensor, " n"], risk: float) -> float:
    """Return the largest fraction that a confidence threshold accepts with an error rate ≤ ``risk``, or 0."""
    check_same_length("coverage_at_risk", confidence, correct)
    values, order = confidence.sort(descending=True)
    accepted = tie_ends(values)
    errors = (~correct[order]).cumsum(0)[accepted - 1]
    allowed = errors.double() <= risk * accepted + RANK_ROUNDING
    return float(accepted[allowed].max()) / len(confidence) if bool(allowed.any()) else 0.0
