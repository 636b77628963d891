"""Scores that tell two sets of images apart, against loops."""

from __future__ import annotations

import pytest
import torch

from psc_core.evaluation.classification import separation
from tests.reference import metrics as naive


def test_equals_loops() -> None:
    drawn = torch.randn(4, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inside, outside = {"psc": drawn[0], "knn": drawn[1]}, {"psc": drawn[2, :30] + 1, "knn": drawn[3, :30]}
    found = separation(inside, outside, alpha=0.1)
    for name, one in found.items():
        i, o = inside[name].tolist(), outside[name].tolist()
        assert one.auroc == pytest.approx(naive.auroc(i, o))
        assert one.aupr_out == pytest.approx(naive.aupr(o, i))
        assert one.aupr_in == pytest.approx(naive.aupr([-x for x in i], [-x for x in o]))
        assert one.fpr95 == pytest.approx(naive.fpr(i, o, 0.95))
        assert one.auroc_difference.value == pytest.approx(found["psc"].auroc - one.auroc)


@pytest.mark.parametrize(("alpha", "above"), [(0.1, 5), (0.05, 2), (0.001, 0)])
def test_a_threshold_keeps_the_rate_of_false_alarms(alpha: float, above: int) -> None:
    scores = {"psc": torch.randperm(50).double()}
    threshold = separation(scores, scores, alpha)["psc"].threshold
    assert int((scores["psc"] > threshold).sum()) == above
