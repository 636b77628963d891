"""Served densities: log-densities, explanations, large batches."""

from __future__ import annotations

import math

import pytest
import torch

from psc_core import density
from psc_core.density import Examples, fit_density
from tests.psc_core.density.support import KINDS, images


def test_density_integrates_to_one() -> None:
    z, labels = images(600, 2, 3, seed=1)
    for kind in ("gda", "tied"):
        model = fit_density(Examples(z, labels, 3), kind=kind, pca=2)
        ticks = torch.linspace(-12, 12, 400)
        grid = torch.cartesian_prod(ticks, ticks)
        cell = (ticks[1] - ticks[0]).item() ** 2
        assert model(grid).log_density.exp().sum().item() * cell == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_z_is_a_change_of_variables(kind: str) -> None:
    z, labels = images(400, 6, 3)
    small = fit_density(Examples(z, labels, 3), kind=kind, pca=4)(z).log_density
    large = fit_density(Examples(1024 * z, labels, 3), kind=kind, pca=4)(1024 * z).log_density
    shift = 0.0 if kind in ("rmd", "gda++", "mahalanobis++", "pooled++") else 4 * math.log(1024)
    torch.testing.assert_close(large + shift, small, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_log_density_is_lower_out_of_distribution(kind: str) -> None:
    z, labels = images(900, 8, 3, offset=0.5)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    noise = 4 * torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
    assert model(noise).log_density.median() < model(z).log_density.quantile(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_explanation_matches_distances(kind: str) -> None:
    z, labels = images(600, 7, 3)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    distances, nearest, deviation = model.explain(z)
    assert distances.shape == (600, 3)
    assert (nearest == distances.argmin(1)).all()
    assert (nearest == labels).float().mean() > 0.9
    torch.testing.assert_close(deviation.norm(dim=1), distances.amin(1), rtol=1e-3, atol=1e-4)


def test_splits_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3))
    whole = model(z)
    monkeypatch.setattr(density, "SERVE_ELEMENTS", 100)
    torch.testing.assert_close(model(z), whole)
