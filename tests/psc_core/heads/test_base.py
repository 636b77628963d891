"""What every head has in common: standardised features, predictions, scores, restoring, errors."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import metrics
from psc_core.answers import CLASSIFICATION_SCORES, REGRESSION_SCORES
from psc_core.errors import BundleError, FitError
from psc_core.fitted import restore
from psc_core.heads.base import Head, entropy, fit_standardisation, other_classes
from psc_core.tasks.classification import Classification
from psc_core.tasks.regression import Regression
from tests.psc_core.heads import regressions
from tests.psc_core.heads.classifiers import KINDS, SEEDS, fit, fit_head, images
from tests.reference import heads as naive


def test_column_that_only_rounds_is_constant() -> None:
    z = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    z[:, 1] = 1e7 + torch.arange(200) % 2
    scale = fit_standardisation(z).inverse_scale
    assert scale[1] == scale[0]


def test_a_layer_that_only_rounds_is_constant() -> None:
    """Beside another; of its columns some have a mean of zero, but the rounding of the others."""
    random = torch.Generator().manual_seed(0)
    z = 1e-3 * torch.randn(200, 8, generator=random)
    steps = torch.randint(-4, 5, (200, 5), generator=random) * torch.finfo(torch.float32).eps
    z[:, 3:] = torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0]) + steps
    scale = fit_standardisation(z, [3, 5]).inverse_scale
    assert (scale[3:] == scale[:3].min()).all()
    with pytest.raises(FitError, match="equal"):
        fit_standardisation(z[:, 3:])


def test_a_layer_of_another_scale_is_not_constant() -> None:
    z = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    z[:, 0] = 0  # constant in its layer
    z[:, 3:] *= 1e8
    phi = fit_standardisation(z, [3, 5])(z)[:]
    torch.testing.assert_close(phi.std(0, correction=0), torch.tensor([0.0, *[1.0] * 7]).double())


@given(st.integers(2, 30), st.integers(1, 6), SEEDS, st.sampled_from([1e-3, 1.0, 1e3]))
def test_standardisation_matches_loops(n: int, dim: int, seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, dim, generator=random, dtype=torch.float64)
    z[:, 1:2] = 5 * scale  # a constant column
    torch.testing.assert_close(fit_standardisation(z)(z)[:], naive.standardise(z))


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


fitted = functools.cache(fit)


@pytest.mark.parametrize("kind", KINDS)
@given(SEEDS, st.sampled_from([0.0, 0.1, 1.0, 30.0, 1e4]), st.booleans())
def test_the_parts_of_the_entropy_sum_to_the_served_one(kind: str, seed: int, spread: float, near: bool) -> None:
    head = fitted(kind)
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


@pytest.mark.parametrize(
    ("heads", "kind"), [(task.heads, kind) for task in (Classification, Regression) for kind in sorted(task.heads)]
)
def test_round_trip(heads: Mapping[str, type[Head]], kind: str) -> None:
    """A fit is repeatable; restored from JSON and tensors it is the same one, and with a tensor less it is refused."""
    one, same = ((fit if heads is Classification.heads else regressions.fit)(kind) for _ in range(2))
    again = restore(heads, json.loads(json.dumps(one.config())), one.state_dict())
    assert type(again) is type(one) and again.config() == same.config() == one.config()
    z, _ = images(20, 6, 3)
    assert all(torch.equal(got, expected) for got, expected in zip(again(z), one(z), strict=True))
    state = dict(one.state_dict())
    state.popitem()
    with pytest.raises(BundleError, match="expected tensors"):
        restore(heads, one.config(), state)


@pytest.mark.parametrize("kind", KINDS)
def test_scores_are_those_of_the_answer_that_need_no_density(kind: str) -> None:
    z, _ = images(20, 6, 3)
    head = fit(kind)
    scores, probabilities = head.score(z, None)
    assert {*scores} - {"confidence"} <= {*head.score_names} and head.score_names == CLASSIFICATION_SCORES
    assert torch.equal(probabilities, head(z).probabilities) and torch.equal(scores["epistemic"], head(z).epistemic)
    torch.testing.assert_close(scores["predictive_entropy"], entropy(probabilities))


@given(st.integers(2, 30), st.integers(0, 99))
def test_confidence_reads_the_most_probable_classes_but_the_first(classes: int, seed: int) -> None:
    p = (9 * torch.randn(5, classes, generator=torch.Generator().manual_seed(seed))).softmax(1)
    expected = [sum(each**0.2 for each in sorted(row, reverse=True)[1:10]) for row in p.tolist()]
    assert other_classes(p).tolist() == pytest.approx(expected, rel=1e-5)
    read = min(classes, 10)
    assert (other_classes(p) <= (1 + 1e-5) * (read - 1) * read**-0.2).all()  # reached where these are equally probable


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_confidence_is_high_where_the_logits_are_low(kind: str) -> None:
    z, _ = images(400, 6, 3, seed=5)
    head = fit(kind)
    odd = torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    usual, unusual = (head.score(each, None).scores["confidence"] for each in (z, 0.1 * odd))
    assert metrics.auroc(usual, unusual) > 0.6


def test_rejects_unusable_arguments() -> None:
    train, val = images(30, 4, 3), images(20, 4, 3, seed=1)
    with pytest.raises(FitError, match="every class"):
        fit_head(*train, *val, num_classes=4)
    with pytest.raises(FitError, match="all are equal"):
        fit_head(torch.full((30, 4), 0.1), train[1], *val, num_classes=3)
    with pytest.raises(FitError, match="NaN"):
        fit_head(*train, val[0] * math.nan, val[1], num_classes=3)


REGRESSIONS = pytest.mark.parametrize("kind", regressions.KINDS)


@REGRESSIONS
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_numbers(kind: str, scale: float) -> None:
    z, y = regressions.images(400, 6, seed=5, scale=scale)
    head = regressions.fit(kind, scale=scale)
    mean, aleatoric, epistemic = head(z)
    assert float((mean - y).square().mean().sqrt()) < 0.8 * float(y.std())
    inside = (mean - y).abs() < 2 * torch.hypot(aleatoric, epistemic)
    assert 0.8 < float(inside.double().mean()) <= 1.0
    assert float(head(z + 30 * scale).epistemic.mean()) > float(epistemic.mean())


@REGRESSIONS
def test_scores_of_numbers_are_those_of_the_answer_that_need_no_density(kind: str) -> None:
    z, y = regressions.images(20, 6, seed=2)
    head = regressions.fit(kind)
    scores, probabilities = head.score(z, None)
    assert tuple(scores) == head.score_names[: len(scores)] and head.score_names == REGRESSION_SCORES
    assert probabilities.shape == (20, 0)
    assert all(torch.equal(scores[name], part) for name, part in head(z)._asdict().items())
    own, _ = head.score(z, y.float()[:, None])
    assert torch.equal(own["mean"], y.float()) and torch.equal(own["aleatoric"], scores["aleatoric"])


@REGRESSIONS
def test_degenerate_features_of_numbers(kind: str) -> None:
    z, y = regressions.images(30, 50)  # Fewer images than columns.
    z[:, 3], z[:, 4] = 1e4, z[:, 5]  # A constant and a repeated column.
    head = regressions.fit_head(z, y, z, y, kind=kind)
    assert all(bool(part.isfinite().all()) for part in head(z))
    assert float((head(z).mean - y).square().mean().sqrt()) < float(y.std())


@REGRESSIONS
def test_unusable_input_is_refused(kind: str) -> None:
    z, y = regressions.images(10, 2)
    with pytest.raises(FitError, match="all are equal"):
        regressions.fit_head(z, 0 * y, z, y, kind=kind)
    with pytest.raises(FitError, match="finite features"):
        regressions.fit_head(z / 0, y, z, y, kind=kind)
