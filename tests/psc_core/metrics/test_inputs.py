"""Order of the input, ties and unusable inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import metrics as classification
from psc_core import metrics as inputs
from psc_core import metrics as ranking
from psc_core import metrics as selective
from psc_core.errors import UsageError
from tests.psc_core.metrics.support import PREDICTIONS, unzip


@given(PREDICTIONS, st.randoms(use_true_random=False))
def test_input_order_does_not_matter(predictions: list[tuple[float, bool]], random: object) -> None:
    c, ok = unzip(predictions)
    order = torch.randperm(len(c), generator=torch.Generator().manual_seed(len(c)))
    for metric in (classification.ece, classification.adaptive_ece, selective.aurc, selective.augrc):
        assert metric(c, ok) == pytest.approx(metric(c[order], ok[order]), abs=1e-12)


def test_rejects_unusable_inputs() -> None:
    with pytest.raises(UsageError, match="at least one value"):
        ranking.auroc(torch.zeros(0), torch.zeros(1))
    with pytest.raises(UsageError, match="NaN"):
        ranking.fpr95(torch.tensor([math.nan]), torch.zeros(1))
    with pytest.raises(UsageError, match="one length, got 2 and 1"):
        inputs.check_same_length("ece", torch.ones(2), torch.ones(1))  # callers' shapes are checked before, in tests
