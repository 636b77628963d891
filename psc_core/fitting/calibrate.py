"""Calibrate a scorer on validation images, through the path that serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from psc_core.calibration.conformal import Calibration
from psc_core.calibration.fit import CONFIDENCE, ambiguity_threshold, fit_calibration, unreachable_entropy
from psc_core.compute.passes import Compute, track_images
from psc_core.data.dataset import ImageDataset
from psc_core.gates.fit.gates import fit_gates
from psc_core.gates.gates import readings_of
from psc_core.metrics import classification
from psc_core.model.pipeline import Pipeline, Scored, Scorer, ood_score_of

OOD_SCORES: Final = ("gates", "density")
"""What the OOD score, and with it the p-value, is made of."""


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
    """What the gates need on ``selection``; calibration scores and ambiguity threshold on ``calibration_split``.

    ``ood_score`` is one of :data:`OOD_SCORES`, ``gates`` the names of those that make the score ``"gates"``; ``risk``
    is the error rate that images below the ambiguity threshold keep with :data:`psc_core.calibration.fit.CONFIDENCE`.

    Raises:
        UsageError: ``risk`` is outside (0, 1).
        FitError: Scores that are not finite.
    """
    fitted_gates = None
    scored, labels = score_dataset(scorer, calibration_split, compute, "calibration")
    if ood_score == "gates":
        selected = score_dataset(scorer, selection, compute, "selection")[0].scores
        fitted_gates = fit_gates(gates, readings_of(gates, selected), readings_of(gates, scored.scores))
    entropies = scored.scores["predictive_entropy"]
    calibration = fit_calibration(ood_score_of(scored.scores, fitted_gates), entropies, scored.probabilities, labels)
    correct = scored.probabilities.argmax(1) == labels
    threshold = ambiguity_threshold(entropies, correct, risk=risk)
    metrics = {
        **calibration_metrics(scored, labels),
        "risk": {"promised": risk, "confidence": CONFIDENCE, "threshold": threshold},
    }
    if threshold is None:
        threshold = unreachable_entropy(calibration.num_classes)
    pipeline = Pipeline(scorer, calibration.ood_scores, fitted_gates)
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
