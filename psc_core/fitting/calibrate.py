"""Calibrate a scorer on validation images, through the path that serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from psc_core.calibration.conformal import Calibration
from psc_core.calibration.fit import CONFIDENCE, ambiguity_threshold, fit_calibration, unreachable_entropy
from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.gates.fit.gates import fit_gates
from psc_core.gates.gates import readings_of
from psc_core.metrics import classification
from psc_core.model.pipeline import Pipeline, Scored, Scorer, ood_score_of

OOD_SCORES: Final = ("gates", "density", "density+entropy")
"""What the OOD score, and with it the p-value, is made of."""

SMALLEST_SPREAD: Final = 1e-6
"""Spread of an entropy, nats, that float32 probabilities resolve."""


class Calibrated(NamedTuple):
    """A calibrated pipeline."""

    pipeline: Pipeline  # pixels to outputs
    calibration: Calibration  # scores of the calibration images
    ambiguity_threshold: float  # predictive entropy above which an image is ambiguous, nats
    metrics: dict[str, Any]  # of the calibration split, JSON types


def calibrate(
    scorer: Scorer,
    selection: ImageDataset,
    calibration_split: ImageDataset,
    compute: Compute,
    *,
    ood_score: str,
    risk: float,
    gates: Sequence[str] = (),
) -> Calibrated:
    """What the OOD score needs on ``selection``; calibration scores and ambiguity threshold on ``calibration_split``.

    ``ood_score`` is one of :data:`OOD_SCORES`, ``gates`` the names of those that make the score ``"gates"``; ``risk``
    is the error rate that images below the ambiguity threshold keep with :data:`psc_core.calibration.fit.CONFIDENCE`.

    Raises:
        UsageError: ``risk`` is outside (0, 1).
        FitError: Scores that are not finite.
    """
    weight, fitted_gates = 0.0, None
    scored, labels = score_dataset(scorer, calibration_split, compute, "calibration")
    if ood_score != "density":
        selected = score_dataset(scorer, selection, compute, "selection")[0].scores
        if ood_score == "gates":
            fitted_gates = fit_gates(gates, readings_of(gates, selected), readings_of(gates, scored.scores))
        else:
            weight = entropy_weight(selected)
    entropies = scored.scores["predictive_entropy"]
    calibration = fit_calibration(
        ood_score_of(scored.scores, weight, fitted_gates), entropies, scored.probabilities, labels
    )
    correct = scored.probabilities.argmax(1) == labels
    threshold = ambiguity_threshold(entropies, correct, risk=risk)
    metrics = {
        **calibration_metrics(scored, labels),
        "risk": {"promised": risk, "confidence": CONFIDENCE, "threshold": threshold},
    }
    if threshold is None:
        threshold = unreachable_entropy(calibration.num_classes)
    pipeline = Pipeline(scorer, calibration.ood_scores, weight, fitted_gates)
    return Calibrated(pipeline, calibration, threshold, metrics)


@torch.inference_mode()
def score_dataset(
    scorer: Scorer, dataset: ImageDataset, compute: Compute, description: str
) -> tuple[Scored, Int[Tensor, " n"]]:
    """Scores and probabilities of every image through the path that serves, on the CPU, and one label of each."""
    parts = []
    for batch in track_images(dataset, compute, description):
        scored = scorer(batch.images.to(compute.device))
        parts.append(Scored({name: values.cpu() for name, values in scored.scores.items()}, scored.probabilities.cpu()))
    scores = {name: torch.cat([part.scores[name] for part in parts]) for name in parts[0].scores}
    return Scored(scores, torch.cat([part.probabilities for part in parts])), dataset.first_labels()


def entropy_weight(scores: Mapping[str, Tensor]) -> float:
    """Upper spread of the negative log density ÷ that of the predictive entropy; 0 where the entropy hardly varies."""
    density, uncertainty = upper_spread(-scores["log_density"]), upper_spread(scores["predictive_entropy"])
    return density / uncertainty if uncertainty > SMALLEST_SPREAD else 0.0


def upper_spread(score: Float[Tensor, " n"]) -> float:
    """Distance from the median of a score to its 95 % quantile, the side on which images are unusual.

    Unlike a standard deviation it ignores the few images beyond, and unlike a median absolute deviation it is not 0
    where most images are certain.
    """
    middle, high = torch.quantile(score.double(), torch.tensor([0.5, 0.95], dtype=torch.float64))
    return float(high - middle)


def calibration_metrics(scored: Scored, labels: Tensor) -> dict[str, Any]:
    """Metrics of the calibration split, on which nothing that they measure was selected."""
    probabilities = scored.probabilities.double()
    confidence, predicted = probabilities.max(1)
    return {
        "validation_images": len(labels),
        "accuracy": classification.accuracy(probabilities, labels),
        "nll_nats": classification.nll(probabilities, labels),
        "ece": classification.ece(confidence, predicted == labels),
        "mean_entropy_nats": float(scored.scores["predictive_entropy"].double().mean()),
    }
