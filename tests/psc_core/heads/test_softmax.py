"""Logistic regression and its change of variables against autograd and brute force."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.heads import softmax
from tests.psc_core.heads.classifiers import SEEDS, images
from tests.reference import heads as naive


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(2, 5), SEEDS, st.sampled_from([1e-2, 1.0, 1e3]))
def test_objective_and_gradient_match_autograd(dim: int, classes: int, seed: int, prior_precision: float) -> None:
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(20, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (20,), generator=random)
    theta = torch.randn(classes, dim + 1, generator=random, dtype=torch.float64).requires_grad_()
    expected = naive.softmax_objective(theta, phi, labels, prior_precision)
    expected.backward()
    loss, gradient = softmax.objective(theta.detach(), phi, labels, prior_precision=prior_precision)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, theta.grad)


def test_reaches_the_same_minimum_from_any_start() -> None:
    z, labels = images(400, 5, 4)
    start = torch.zeros(4, 6, dtype=torch.float64)
    weight, bias = softmax.fit_softmax(z, labels, prior_precision=1.0, start=start)
    theta = torch.cat([weight, bias[:, None]], dim=1)
    _, gradient = softmax.objective(theta, z.double(), labels, prior_precision=1.0)
    assert gradient.abs().max() < 1e-5
    again, _ = softmax.fit_softmax(z, labels, prior_precision=1.0, start=start)
    assert torch.equal(weight, again)
    elsewhere, _ = softmax.fit_softmax(z, labels, prior_precision=1.0, start=start + torch.randn(4, 6))
    torch.testing.assert_close(weight, elsewhere, rtol=1e-3, atol=1e-3)


def test_chooses_the_best_selection_nll() -> None:
    (z, y), (z_val, y_val) = images(40, 30, 3), images(300, 30, 3, seed=1)
    chosen = softmax.choose_softmax(z, y, z_val, y_val, num_classes=3)
    start = torch.zeros(3, 31, dtype=torch.float64)
    for prior_precision in softmax.PRIOR_PRECISIONS:
        weight, bias = softmax.fit_softmax(z, y, prior_precision=prior_precision, start=start)
        nll = softmax.nll(z_val @ weight.float().T + bias.float(), y_val).mean().item()
        assert chosen.selection_nll <= nll + 1e-4


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 10.0]), st.booleans())
def test_variables_invert_and_flatten_the_curvature(
    dim: int, classes: int, seed: int, prior_precision: float, exact: bool
) -> None:
    """There and back; gradients by the chain rule; curvature near the identity."""
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(40, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (40,), generator=random)
    theta = float(exact) * torch.randn(classes, dim + 1, generator=random, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "CURVATURE_EXAMPLES", 40)
        patch.setattr(softmax, "EXACT_REPEATS", 1 if exact else 2)
        variables = softmax.variables_at(theta, phi, prior_precision=prior_precision)
    assert isinstance(variables, softmax.ExactVariables if exact else softmax.KroneckerVariables)
    v = variables.of(theta)
    torch.testing.assert_close(variables.theta(v), theta)

    def loss(at: Tensor) -> Tensor:
        return naive.softmax_objective(variables.theta(at), phi, labels, prior_precision)

    _, gradient = softmax.objective(theta, phi, labels, prior_precision=prior_precision)
    (expected,) = torch.autograd.grad(loss(v.requires_grad_()), v)
    torch.testing.assert_close(variables.gradient(gradient), expected)
    curvature = torch.autograd.functional.hessian(loss, v.detach()).reshape(v.numel(), -1)
    # with the same p for every image, as at θ = 0, the curvature is a Kronecker product
    torch.testing.assert_close(curvature, torch.eye(v.numel(), dtype=torch.float64), rtol=0, atol=1e-8)


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 10.0]), st.booleans())
def test_variables_match_the_dense_curvature(
    dim: int, classes: int, seed: int, prior_precision: float, exact: bool
) -> None:
    """``‖V‖² = vec(θ)ᵀ C vec(θ)`` in any direction, away from θ = 0 too."""
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(30, dim, generator=random, dtype=torch.float64)
    theta = torch.randn(classes, dim + 1, generator=random, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "CURVATURE_EXAMPLES", 30)
        patch.setattr(softmax, "EXACT_REPEATS", 1 if exact else 2)
        variables = softmax.variables_at(theta, phi, prior_precision=prior_precision)
    curvature = naive.softmax_curvature(theta, phi, prior_precision / 30, exact=exact)
    directions = torch.randn(5, classes, dim + 1, generator=random, dtype=torch.float64)
    lengths = torch.stack([variables.of(direction).square().sum() for direction in directions])
    flat = directions.flatten(1)
    torch.testing.assert_close(lengths, torch.einsum("ni,ij,nj->n", flat, curvature, flat))
