"""What every head of a regression has in common: predictions, scores, restoring, errors."""

from __future__ import annotations

import pytest
import torch

from psc_core.answers import REGRESSION_SCORES
from psc_core.errors import FitError
from psc_core.tasks.regression import Regression
from tests.psc_core.heads.regressions import KINDS, fit, fit_head, images
from tests.psc_core.tasks.support import check_round_trip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_predictions(kind: str, scale: float) -> None:
    z, y = images(400, 6, seed=5, scale=scale)
    head = fit(kind, scale=scale)
    mean, aleatoric, epistemic = head(z)
    assert float((mean - y).square().mean().sqrt()) < 0.8 * float(y.std())
    inside = (mean - y).abs() < 2 * torch.hypot(aleatoric, epistemic)
    assert 0.8 < float(inside.double().mean()) <= 1.0
    assert float(head(z + 30 * scale).epistemic.mean()) > float(epistemic.mean())


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_answer_that_need_no_density(kind: str) -> None:
    z, y = images(20, 6, seed=2)
    head = fit(kind)
    scores, probabilities = head.score(z, None)
    assert tuple(scores) == head.score_names[: len(scores)] and head.score_names == REGRESSION_SCORES
    assert probabilities.shape == (20, 0)
    assert all(torch.equal(scores[name], part) for name, part in head(z)._asdict().items())
    own, _ = head.score(z, y.float()[:, None])
    assert torch.equal(own["mean"], y.float()) and torch.equal(own["aleatoric"], scores["aleatoric"])


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_features(kind: str) -> None:
    z, y = images(30, 50)  # Fewer images than columns.
    z[:, 3], z[:, 4] = 1e4, z[:, 5]  # A constant and a repeated column.
    head = fit_head(z, y, z, y, kind=kind)
    assert all(bool(part.isfinite().all()) for part in head(z))
    assert float((head(z).mean - y).square().mean().sqrt()) < float(y.std())


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    z, _ = images(20, 6)
    head = fit(kind)
    check_round_trip(Regression.heads, head, z)
    assert fit(kind).config() == head.config()


@pytest.mark.parametrize("kind", KINDS)
def test_unusable_input_is_refused(kind: str) -> None:
    z, y = images(10, 2)
    with pytest.raises(FitError, match="all are equal"):
        fit_head(z, 0 * y, z, y, kind=kind)
    with pytest.raises(FitError, match="finite features"):
        fit_head(z / 0, y, z, y, kind=kind)
