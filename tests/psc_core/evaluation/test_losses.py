"""Losses of labelled examples, and the metrics of a classifier."""

from __future__ import annotations

import math

import pytest
import torch

from psc_core.data.dataset import Batch
from psc_core.evaluation.classification import QUALITIES, losses_of


def test_an_image_with_two_labels_has_two_losses() -> None:
    probabilities = torch.tensor([[0.8, 0.2], [0.4, 0.6]])
    batch = Batch(torch.zeros(2, 1, 1, 1, dtype=torch.uint8), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]))
    losses = losses_of(probabilities, batch)
    assert losses.nll.tolist() == pytest.approx([-math.log(0.8), -math.log(0.4), -math.log(0.6)])
    assert losses.brier.tolist() == pytest.approx([0.08, 0.72, 0.32])
    assert losses.confidence.tolist() == pytest.approx([0.8, 0.6, 0.6])
    assert losses.correct.tolist() == [True, False, True]
    metrics = {name: compute(losses) for name, (_, compute) in QUALITIES.items()}
    assert metrics["accuracy"] == pytest.approx(2 / 3)
    assert metrics["coverage_at_risk_1_percent"] == pytest.approx(1 / 3)
    assert metrics["nll"] == pytest.approx(float(losses.nll.mean()))
