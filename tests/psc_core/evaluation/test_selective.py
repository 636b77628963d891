"""Accepting images: every score and both thresholds of the service, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.evaluation.classification import acceptance, ood_accepted
from tests.psc_core.test_metrics import LEVELS, SCORES, tensor
from tests.reference import metrics as naive

IMAGES = st.lists(st.tuples(LEVELS, LEVELS, st.booleans()), min_size=1, max_size=12)


@given(SCORES, SCORES)
def test_accepted_ood_images_equal_a_loop(inside: list[float], outside: list[float]) -> None:
    found = ood_accepted(tensor(inside), tensor(outside))
    assert found == pytest.approx(naive.ood_accepted(inside, outside, 0.95))


@given(IMAGES, IMAGES)
def test_equals_loops(known: list[tuple[float, float, bool]], unknown: list[tuple[float, float, bool]]) -> None:
    inside, outside = (
        {"psc": tensor([row[0] for row in rows]), "psc-entropy": tensor([row[1] for row in rows])}
        for rows in (known, unknown)
    )
    found = acceptance(inside, outside, torch.tensor([row[2] for row in known]))
    ranks = {
        name: [max(naive.rank(row[axis], [other[axis] for other in known]) for axis in (0, 1)) for row in rows]
        for name, rows in (("known", known), ("unknown", unknown))
    }
    correct = [row[2] for row in known] + [False] * len(unknown)
    own = found["psc-decision"]
    assert own.ood_accepted == pytest.approx(naive.ood_accepted(ranks["known"], ranks["unknown"], 0.95))
    assert own.aurc == pytest.approx(naive.aurc([-rank for rank in ranks["known"] + ranks["unknown"]], correct))
    scores = [row[0] for row in known + unknown]
    assert found["psc"].aurc == pytest.approx(naive.aurc([-score for score in scores], correct))


def test_two_thresholds_accept_less_where_each_score_sees_other_images() -> None:
    generator = torch.Generator().manual_seed(0)
    inside = {name: torch.randn(1000, generator=generator) for name in ("psc", "psc-entropy")}
    outside = {name: torch.randn(100, generator=generator) for name in inside}
    outside["psc"][:50] += 10
    outside["psc-entropy"][50:] += 10
    found = acceptance(inside, outside, torch.ones(1000, dtype=torch.bool))
    assert found["psc-decision"].ood_accepted == 0.0
    assert found["psc"].ood_accepted > 0.4 and found["psc-entropy"].ood_accepted > 0.4
    assert found["psc-decision"].aurc < min(found["psc"].aurc, found["psc-entropy"].aurc)
