"""Measure abstention: risk against coverage when the least confident predictions are rejected first; float64.

``confidence`` (n,), usually max_c p_c; ``correct`` (n,) whether the arg max is the label.  See :mod:`.inputs` for ties
and invalid inputs.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from psc_core.metrics.inputs import by_confidence, check_same_length, tie_sizes
from psc_core.rates import RANK_ROUNDING


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
    accepted = tie_sizes(values).cumsum(0)
    errors = (~correct[order]).cumsum(0)[accepted - 1]
    allowed = errors.double() <= risk * accepted + RANK_ROUNDING
    return float(accepted[allowed].max()) / len(confidence) if bool(allowed.any()) else 0.0
