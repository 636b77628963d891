"""The choice of prior precision and temperature."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.heads.fit import laplace, posterior, softmax
from psc_core.heads.fit import sngp as sngp_fit
from psc_core.heads.fit.posterior import PRIOR_IMAGES, choose_posterior
from psc_core.heads.fit.temperature import fit_temperature
from tests.psc_core.heads.support import SEEDS, fit, images
from tests.reference import heads as naive


def test_chooses_precision_and_temperature() -> None:
    """Noise costs a wide posterior, not what flattens all alike; one that needs no temperature comes first."""
    random = torch.Generator().manual_seed(0)
    honest = 3 * torch.randn(4000, 3, generator=random, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(1), 1, generator=random).squeeze(1)
    noise = torch.randn(4000, 3, generator=random, dtype=torch.float64)
    spoilt = {0.1: 1.0, 1.0: 0.0, 10.0: 0.0, 100.0: 0.0}

    def logits_with(precision: float) -> Tensor:
        return (honest + spoilt[precision] * noise) / 2

    choice = choose_posterior(logits_with, labels, tuple(spoilt))
    assert choice.precision == 1.0
    assert choice.temperature == pytest.approx(0.5, abs=0.03)
    best = fit_temperature(logits_with(1.0), labels, prior_images=PRIOR_IMAGES)
    assert choice.temperature == pytest.approx(best, rel=1e-9)
    assert choice.val_nll == pytest.approx(posterior.nll(logits_with(1.0) / best, labels).mean().item())
    flattened = choose_posterior(lambda precision: honest * precision / (1 + precision), labels, (1.0, 1000.0))
    assert flattened[:2] == (1000.0, 1.0)


def test_keeps_temperature_one_within_its_error() -> None:
    """The honest logits keep 1 in at least nine of ten draws; a deviation of several errors is corrected."""
    random = torch.Generator().manual_seed(0)
    ones, best = 0, []
    for _ in range(40):
        honest = 3 * torch.randn(500, 3, generator=random, dtype=torch.float64)
        labels = torch.multinomial(honest.softmax(1), 1, generator=random).squeeze(1)
        choice = choose_posterior(lambda _, logits=honest: logits, labels, (1.0,))
        ones += choice.temperature == 1.0
        best.append(fit_temperature(honest, labels, prior_images=PRIOR_IMAGES))
        assert choice.val_nll == pytest.approx(posterior.nll(honest / choice.temperature, labels).mean().item())
        assert choose_posterior(lambda _, logits=honest: 2 * logits, labels, (1.0,)).temperature > 1.5
    assert 36 <= ones < 40
    assert min(best) < 0.95 and max(best) > 1.05


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_temperature_undoes_shrunk_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a strong prior keeps far too small are served larger."""
    module = {"laplace": laplace, "sngp": sngp_fit}[kind]
    monkeypatch.setattr(softmax, "PRECISIONS", (1e3,))
    monkeypatch.setattr(module, "PRECISIONS", (1e6,))
    head = fit(kind)
    assert head.record["temperature"] < 0.6
    assert head.record["val_nll"] < 0.8 * head.record["map_val_nll"]
    z, labels = images(150, 6, 3, seed=1)
    served = posterior.nll(head(z).probabilities.log(), labels).mean().item()
    assert served == pytest.approx(head.record["val_nll"], abs=1e-4)


@settings(max_examples=15)
@given(st.integers(2, 60), SEEDS, st.sampled_from([0.3, 1.0, 3.0]))
def test_choice_matches_search(n: int, seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=random)
    logits = {
        precision: spread * torch.randn(n, 3, generator=random, dtype=torch.float64) + 2 * torch.eye(3)[labels].double()
        for precision in (0.01, 1.0, 100.0)
    }
    temperatures = {key: fit_temperature(f, labels, prior_images=PRIOR_IMAGES) for key, f in logits.items()}
    choice = choose_posterior(logits.__getitem__, labels, tuple(logits))
    assert choice == pytest.approx(naive.choose_posterior(logits, temperatures, labels), rel=1e-6)
