"""What every head has in common: predictions, restoring, errors."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import metrics
from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import FitError
from psc_core.heads.base import entropy
from psc_core.tasks.classification import Classification
from tests.psc_core.heads.classifiers import KINDS, SEEDS, fit, fit_head, images
from tests.psc_core.tasks.support import check_round_trip
from tests.reference import heads as naive


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_predictions(kind: str, scale: float) -> None:
    z, labels = images(400, 6, 3, seed=5, scale=scale)
    head = fit(kind, scale=scale)
    output = head(z)
    assert output.probabilities.shape == (400, 3)
    torch.testing.assert_close(output.probabilities.sum(1), torch.ones(400))
    assert (output.probabilities.argmax(1) == labels).float().mean() > 0.8
    assert head.record["val_nll"] < 0.6
    noise = 20 * scale * torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    assert head(noise).epistemic.mean() > output.epistemic.mean()
    assert head.epistemic_unit


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e4]), st.booleans())
def test_the_parts_of_the_entropy_sum_to_the_served_one(kind: str, seed: int, spread: float, near: bool) -> None:
    head = fit(kind)
    noise = torch.randn(20, 6, generator=torch.Generator().manual_seed(seed))
    z = images(20, 6, 3, seed=seed)[0] + spread * noise if near else spread * noise
    aleatoric, epistemic = head.decompose(z)
    p = head(z).probabilities.double()
    served = -torch.special.xlogy(p, p).sum(1)
    torch.testing.assert_close(aleatoric.double() + epistemic.double(), served, rtol=1e-5, atol=1e-6)
    assert (aleatoric >= 0).all() and (epistemic >= 0).all()
    if kind == "laplace":  # Its epistemic uncertainty is in nats, so the answer and its explanation say the same.
        assert torch.equal(epistemic, head.score(z, None).scores["epistemic"])


def test_the_parts_of_sngp_are_those_of_the_mean_and_of_the_variance() -> None:
    z, _ = images(30, 6, 3, seed=4)
    head = fit("sngp")
    stored = {name: tensor.double() for name, tensor in head.state_dict().items()}
    phi = (z.double() - stored["center"]) * stored["inverse_scale"]
    psi = math.sqrt(2) * torch.cos(phi @ stored["frequencies"] + stored["phases"])
    for image, (aleatoric, epistemic) in enumerate(zip(*head.decompose(z), strict=True)):
        mean = stored["weight"] @ psi[image] + stored["bias"]
        variance = (psi[image] @ stored["covariance_root"]).square().sum()
        expected = naive.entropy(mean.softmax(0))
        total = naive.entropy(naive.probit_probabilities(mean, variance))
        assert float(aleatoric) == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert float(epistemic) == pytest.approx(total - expected, rel=1e-2, abs=1e-4)


def test_the_whole_entropy_of_duq_is_aleatoric() -> None:
    head = fit("duq")
    aleatoric, epistemic = head.decompose(images(30, 6, 3, seed=4)[0])
    assert aleatoric.max() > 0.1 and not epistemic.any()


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_features(kind: str) -> None:
    z, labels = images(30, 50, 3)  # fewer images than columns
    z[:, 3], z[:, 4] = 1e4, z[:, 5]  # a constant and a repeated column
    z[labels == 2] = z[2].clone()  # identical images
    head = fit_head(z, labels, z, labels, num_classes=3, kind=kind)
    assert all(part.isfinite().all() for part in head(z))
    assert (head(z).probabilities.argmax(1) == labels).float().mean() > 0.9
    moved = z.clone()
    moved[:, 3] += 50.0
    if kind != "sngp":  # (a random Fourier process knows no more than "elsewhere")
        assert head(moved).epistemic.mean() > head(z).epistemic.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    z, _ = images(20, 6, 3)
    head = fit(kind)
    check_round_trip(Classification.heads, head, z)
    assert fit(kind).config() == head.config()


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_answer_that_need_no_density(kind: str) -> None:
    z, _ = images(20, 6, 3)
    head = fit(kind)
    scores, probabilities = head.score(z, None)
    assert {*scores} - {"energy"} <= {*head.score_names} and head.score_names == CLASSIFICATION_SCORES
    assert torch.equal(probabilities, head(z).probabilities) and torch.equal(scores["epistemic"], head(z).epistemic)
    torch.testing.assert_close(scores["predictive_entropy"], entropy(probabilities))


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_energy_is_high_where_the_logits_are_low(kind: str) -> None:
    """The energy is −log Σ exp f of logits f that the probabilities, but for the posterior's variance, come from."""
    z, _ = images(400, 6, 3, seed=5)
    head = fit(kind)
    odd = torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    assert metrics.auroc(head(z).energy, head(0.1 * odd).energy) > 0.6


def test_rejects_unusable_arguments() -> None:
    train, val = images(30, 4, 3), images(20, 4, 3, seed=1)
    with pytest.raises(FitError, match=r"at least 1 image of every class, got '3' \(0\)"):
        fit_head(*train, *val, num_classes=4)
    with pytest.raises(FitError, match="all are equal"):
        fit_head(torch.full((30, 4), 0.1), train[1], *val, num_classes=3)
    with pytest.raises(FitError, match="NaN"):
        fit_head(*train, val[0] * math.nan, val[1], num_classes=3)


def test_heads_load_without_laplace_torch() -> None:
    code = "import sys, psc_core.tasks; print('laplace' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
