"""The choice of prior precision and temperature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.evaluation.baselines import fit_temperature
from psc_core.heads import softmax
from psc_core.heads.base import entropy
from psc_core.heads.laplace import LaplaceHead
from psc_core.heads.softmax import COST, choose_posterior, choose_temperature
from tests.psc_core.heads.classifiers import SEEDS, fit, fit_head, images
from tests.reference import heads as naive


def drawn(n: int, *, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, 3, generator=random, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=random).squeeze(1)


def test_keeps_the_prior_of_the_weights_unless_it_costs() -> None:
    """A variance that all images share is undone by T; one that strikes at random is not, and a stronger prior is."""
    logits, labels = drawn(4000)
    alike = torch.ones(4000, 1).double()
    kept = choose_posterior(logits, lambda tau: alike / tau, labels, prior_precision=0.5)
    assert kept.prior_precision == 0.5
    assert kept.temperature < 1
    unequal = torch.rand(4000, 1, generator=torch.Generator().manual_seed(1)).double() ** 4
    stronger = choose_posterior(logits, lambda tau: 100 * unequal / tau, labels, prior_precision=0.5)
    assert stronger.prior_precision > 0.5
    narrow = choose_posterior(logits, lambda tau: 100 * unequal / tau, labels, prior_precision=1e7)
    assert narrow[:2] == (1e7, 1.0)
    assert stronger.selection_nll <= (1 + 1.1 * COST[0]) * narrow.selection_nll


def test_separable_classes_are_not_flattened() -> None:
    """Every image is right: Kronecker factors at the weights' own prior would halve the probabilities."""
    means = 4 * torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(1500) % 10
    z = means[labels] + torch.randn(1500, 64, generator=torch.Generator().manual_seed(2))
    head = fit_head(z[:1000], labels[:1000], z[1000:], labels[1000:], num_classes=10)
    assert head.record["prior_precision"] > 10 * head.record["map_precision"]
    assert head(z).probabilities.amax(1).mean() > 0.99
    assert head.record["val_nll"] < 2 * COST[1]


def test_keeps_temperature_one_within_its_error() -> None:
    """The honest logits keep 1 in at least nine of ten draws; a deviation of several errors is corrected."""
    none, ones = torch.zeros(500, 1).double(), 0
    for seed in range(40):
        honest, labels = drawn(500, seed=seed)
        ones += choose_temperature(honest, none, labels) == 1.0
        assert choose_temperature(2 * honest, none, labels) > 1.5
    assert 36 <= ones <= 40


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_temperature_undoes_shrunk_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a strong prior keeps far too small are served larger."""
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1e3,))
    monkeypatch.setattr(softmax, "STRONGER", (1e3,))
    head = fit(kind)
    assert head.record["temperature"] < 0.6
    assert head.record["val_nll"] < 0.8 * head.record["map_val_nll"]
    z, labels = images(150, 6, 3, seed=1)
    served = softmax.nll(head(z).probabilities.log(), labels).mean().item()
    assert served == pytest.approx(head.record["val_nll"], abs=1e-4)


def test_mutual_information_is_that_of_the_served_posterior(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are drawn from the posterior, their logits divided by T: mean and mutual information are the head's."""
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1e3,))
    z, _ = images(100, 6, 3, seed=7)
    head = fit(n=3000)
    assert isinstance(head, LaplaceHead)
    temperature = head.record["temperature"]
    assert temperature < 0.95
    served = {name: tensor.double() for name, tensor in head.state_dict().items()}
    phi = head.standardise(z).double()
    deviations = ((phi @ served["input_vectors"]).square() @ (temperature**2 * served["weight_spectrum"])
                  + temperature**2 * served["bias_spectrum"]).sqrt()  # fmt: skip
    mean = temperature * (phi @ served["weight"].T + served["bias"])  # of the weights before the temperature
    noise = torch.randn(4000, *mean.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    sampled = ((mean + (deviations * noise) @ served["output_vectors"].T) / temperature).softmax(2)
    information = entropy(sampled.mean(0)) - entropy(sampled).mean(0)
    torch.testing.assert_close(head(z).epistemic.double(), information, rtol=0.1, atol=1.5e-3)
    assert information.mean() > 1e-3


@settings(max_examples=15)
@given(st.integers(2, 40), SEEDS, st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_choice_matches_search(n: int, seed: int, spread: float, by_class: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=random)
    mean = spread * torch.randn(n, 3, generator=random, dtype=torch.float64) + 2 * torch.eye(3)[labels].double()
    widths = torch.rand(n, 3 if by_class else 1, generator=random, dtype=torch.float64) ** 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "STRONGER", (1.0, 10.0, 1000.0))
        choice = choose_posterior(mean, lambda tau: widths / tau, labels, prior_precision=0.02)
    variances = {0.02 * factor: widths / (0.02 * factor) for factor in (1.0, 10.0, 1000.0)}
    precision, temperature = naive.choose_posterior(mean, variances, labels, *COST)
    assert choice.prior_precision == precision
    assert choice.temperature == pytest.approx(temperature, rel=1e-3)
    loss = naive.tempered_loss(mean, variances[precision], choice.temperature, labels)
    assert choice.selection_nll == pytest.approx(loss, rel=1e-9)


def test_prior_limits_the_confidence_of_few_images() -> None:
    """Twenty images that are all right would make the probabilities certain."""
    mean, labels = 5.0 * torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    assert fit_temperature(mean, labels) < 0.2
    assert 0.6 < choose_temperature(mean, torch.zeros(20, 1), labels) <= 1.0
