"""Bayesian linear regression beside its definition, and beside scikit-learn's."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import BayesianRidge

from psc_core import features
from psc_core.heads.base import RegressionHead
from psc_core.heads.blr import fit_log_variance, fit_posterior, gaussian_nll
from tests.psc_core.heads.regressions import fit_head, images


def fitted(n: int = 400, d: int = 5, **options: float) -> tuple[RegressionHead, torch.Tensor, torch.Tensor]:
    (z, y), (z_val, y_val) = images(n, d, seed=0, **options), images(200, d, seed=1, **options)
    return fit_head(z, y, z_val, y_val), z_val, y_val


def standardised(n: int, d: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    z, y = images(n, d, seed=seed, noise=0.15)
    z = z.double()
    return (z - z.mean(0)) / z.std(0, correction=0), (y - y.mean()) / y.std(correction=0)


@given(st.integers(0, 10_000), st.integers(10, 60), st.integers(1, 5))
def test_posterior_equals_scikit_learns(seed: int, n: int, d: int) -> None:
    phi, t = standardised(n, d, seed)
    ours = fit_posterior(phi, t)
    prior = dict.fromkeys(("alpha_1", "alpha_2", "lambda_1", "lambda_2"), 0.0)
    theirs = BayesianRidge(max_iter=3000, tol=1e-12, fit_intercept=False, **prior).fit(phi, t)
    torch.testing.assert_close(ours.mean, torch.from_numpy(theirs.coef_), atol=2e-3, rtol=2e-3)
    assert ours.prior_precision == pytest.approx(theirs.lambda_, rel=0.05)
    precision = ours.noise_precision * phi.T @ phi + ours.prior_precision * torch.eye(d).double()
    torch.testing.assert_close(ours.root @ ours.root.T, torch.linalg.inv(precision), atol=1e-9, rtol=1e-6)


def test_blocks_of_any_size_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    phi, t = standardised(50, 4, 0)
    whole = fit_posterior(phi, t)
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 12)
    torch.testing.assert_close(fit_posterior(phi, t).mean, whole.mean, atol=1e-12, rtol=1e-9)


def test_outputs_equal_their_definition_in_float64() -> None:
    head, z, _ = fitted()
    phi = (z.double() - head.center.double()) * head.inverse_scale.double()
    tensors = {name: tensor.double() for name, tensor in head.state_dict().items()}
    low, high = tensors["log_noise_range"].tolist()
    got = head(z)
    for i in range(20):
        x = phi[i]
        log_noise = min(max(float(x @ tensors["noise_weight"] + tensors["noise_bias"]), low), high)
        covariance = tensors["root"] @ tensors["root"].T
        epistemic = math.sqrt(float(x @ covariance @ x) + float(tensors["bias_deviation"]) ** 2)
        assert float(got.mean[i]) == pytest.approx(float(x @ tensors["weight"] + tensors["bias"]), rel=1e-5)
        assert float(got.aleatoric[i]) == pytest.approx(math.exp(log_noise / 2), rel=1e-4)
        assert float(got.epistemic[i]) == pytest.approx(epistemic, rel=1e-4)


def test_noise_that_depends_on_the_image_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 3, generator=generator)
    deviation = (0.5 * (z[:, 0] - 1)).exp().double()
    y = z[:, 1].double() + deviation * torch.randn(3000, generator=generator).double()
    head = fit_head(z[:2000], y[:2000], z[2000:], y[2000:])
    ratio = (head(z[2000:]).aleatoric.double() / deviation[2000:]).log()
    assert float(ratio.abs().mean()) < 0.1 and head.record["noise_penalty"] > 0


def test_log_variance_is_where_the_gradient_vanishes() -> None:
    generator = torch.Generator().manual_seed(3)
    phi = torch.randn(200, 3, generator=generator, dtype=torch.float64)
    squares = torch.rand(200, generator=generator, dtype=torch.float64) + 0.01
    noise = fit_log_variance(phi, squares, 0.01)
    at = torch.cat([noise.weight, noise.bias[None]]).requires_grad_()
    s = phi @ at[:3] + at[3]
    loss = 0.5 * (squares * (-s).exp() + s).sum() + 0.5 * 2.0 * at[:3].square().sum()
    loss.backward()
    assert at.grad is not None and float(at.grad.abs().max()) < 0.05
    assert noise.range.tolist() == [float(s.detach().min()), float(s.detach().max())]


@pytest.mark.parametrize("off", [0.0, 7.0])
def test_variances_fit_the_validation_images(off: float) -> None:
    """Of the head's own means, and of served means of the network."""
    (z, y), (z_val, y_val) = images(30, 12, seed=0), images(200, 12, seed=1)
    mean = y_val + off if off else None
    head = fit_head(z, y, z_val, y_val, val_mean=mean)
    got = head(z_val)
    error, variance = (got.mean.double() if mean is None else mean) - y_val, got.aleatoric**2 + got.epistemic**2
    assert float((error.square() / variance).mean()) == pytest.approx(1.0, rel=1e-3)
    if mean is None:
        assert gaussian_nll(y_val, got.mean.double(), variance.double()) == pytest.approx(
            head.record["val_nll"], abs=1e-3
        )


@given(st.integers(2, 30), st.integers(1, 6), st.integers(0, 100))
def test_any_size_gives_finite_outputs(n: int, d: int, seed: int) -> None:
    z, y = images(n, d, seed=seed, noise=0.0)
    head = fit_head(z, y, z[:2], y[:2])
    assert all(bool(part.isfinite().all()) for part in head(z + 1e4))
    assert float(head(z).aleatoric.min()) > 0
