"""Measure class probabilities: accuracy, likelihood, and calibration of the confidence; float64.

``probabilities`` (n, K), rows sum to one; ``labels`` (n,) class indices; ``confidence`` (n,) in [0, 1], usually
max_c p_c; ``correct`` (n,) whether the arg max is the label.  See :mod:`.inputs` for ties and invalid inputs.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.metrics.inputs import GUESSING_DEVIATIONS, by_confidence, check_same_length

ECE_BINS = 15
"""The number of bins of both calibration errors, as in Guo et al. (2017)."""

LOG_FLOOR = float(torch.finfo(torch.float32).tiny)
"""The smallest normal float32, to which probabilities are raised: a zero costs 87.3 nats, not infinity."""


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


def nll(probabilities: Float[Tensor, "n classes"], labels: Int[Tensor, " n"]) -> float:
    """Return the mean negative log-likelihood in nats."""
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
