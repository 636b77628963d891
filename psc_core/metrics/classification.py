"""Measure class probabilities: accuracy, likelihood, and calibration of the confidence; float64.

``probabilities`` (n, K), rows sum to one; ``labels`` (n,) class indices; ``confidence`` (n,) in [0, 1], usually
max_c p_c; ``correct`` (n,) whether the arg max is the label.  See :mod:`.inputs` for ties and invalid inputs.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from psc_core.metrics.inputs import by_confidence, check_same_length

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
