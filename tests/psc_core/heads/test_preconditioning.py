"""The variables of logistic regression: a bijection with a curvature near the identity."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.heads import softmax
from tests.psc_core.heads.classifiers import SEEDS
from tests.reference import heads as naive


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
