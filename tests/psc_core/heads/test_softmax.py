"""Logistic regression and its change of variables against autograd and brute force."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.features import as_matrix
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


def test_a_search_that_ends_early_is_told() -> None:
    """Some images lie a thousand times as far out as others, and hardly any prior holds the weights."""
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(1500) % 4
    z = torch.randn(1500, 30, generator=random).double()
    z[:, :4] += 2 * torch.eye(4)[labels]
    z /= torch.randn(1500, 1, generator=random).double().abs()
    z = (z - z.mean(0)) / z.std(0, correction=0)
    start = torch.zeros(4, 31, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"not at their optimum: the gradient is 0\.\d+, and 3e-07 would do"):
        softmax.fit_softmax(z, labels, prior_precision=1e-4, start=start)
    softmax.fit_softmax(z, labels, prior_precision=1.0, start=start)


@pytest.mark.parametrize("count", [40, 400])
def test_chooses_the_strongest_prior_of_the_best_selection_nll(count: int) -> None:
    (z, y), (z_val, y_val) = images(count, 30, 3), images(300, 30, 3, seed=1)
    chosen = softmax.choose_softmax(z, y, z_val, y_val, num_classes=3)
    start, nlls = torch.zeros(3, 31, dtype=torch.float64), {}
    for prior_precision in softmax.PRIOR_PRECISIONS:
        weight, bias = softmax.fit_softmax(z, y, prior_precision=prior_precision, start=start)
        nlls[prior_precision] = softmax.nll(z_val @ weight.float().T + bias.float(), y_val).sum().item()
    limit = min(nlls.values()) + math.log(300) / 2
    assert chosen.prior_precision == max(precision for precision, nll in nlls.items() if nll <= limit)
    assert 300 * chosen.selection_nll == pytest.approx(nlls[chosen.prior_precision], abs=0.05)


@pytest.mark.parametrize("spread", [0.5, 0.7])
def test_rare_training_classes_do_not_end_the_search(spread: float) -> None:
    """The biases learn their proportions first, and the NLL of as many images of each class rises, once or twice."""
    random = torch.Generator().manual_seed(0)
    y, y_val = torch.arange(3000), torch.arange(300) % 3
    y = torch.where(y < 2970, 0, y % 3)
    means = spread * torch.randn(3, 10, generator=random)
    z, z_val = (means[each] + 0.5 * torch.randn(len(each), 10, generator=random) for each in (y, y_val))
    z, z_val = (z - z.mean(0)) / z.std(0), (z_val - z.mean(0)) / z.std(0)
    nlls, start = [], torch.zeros(3, 11, dtype=torch.float64)
    for prior_precision in softmax.PRIOR_PRECISIONS:
        weight, bias = softmax.fit_softmax(z, y, prior_precision=prior_precision, start=start)
        nlls.append(softmax.nll(z_val.double() @ weight.T + bias, y_val).mean().item())
    chosen = softmax.choose_softmax(z, y, z_val, y_val, num_classes=3)
    assert chosen.selection_nll <= min(nlls) + softmax.worth(y_val) / 300 + 1e-3
    assert (chosen.logits(z_val).argmax(1) == y_val).double().mean() > 0.5


def test_a_selection_without_errors_does_not_choose_the_weakest_prior() -> None:
    """Its NLL falls as long as the weights grow; other examples of the same classes pay for that."""
    y = torch.arange(300) % 3
    z, z_val, z_test = (
        3.8 * torch.eye(60)[y] + torch.randn(300, 60, generator=torch.Generator().manual_seed(seed))
        for seed in range(3)
    )
    weak = softmax.fit_softmax(z, y, prior_precision=0.01, start=torch.zeros(3, 61, dtype=torch.float64))
    right = (z_val.double() @ weak[0].T + weak[1]).argmax(1) == y
    chosen = softmax.choose_softmax(z, y, z_val[right], y[right], num_classes=3)
    assert chosen.prior_precision > 0.01
    served, overfit = (
        softmax.nll(logits, y).mean()
        for logits in (chosen.logits(z_test.double()), z_test.double() @ weak[0].T + weak[1])
    )
    assert served < overfit


def in_float64(phi: Tensor, classes: int) -> softmax.Sample:
    sample = softmax.curvature_sample(phi, classes)
    augmented = torch.cat([phi, torch.ones(len(phi), 1, dtype=phi.dtype)], dim=1)
    torch.testing.assert_close(sample.phi.double(), augmented @ sample.axes, rtol=1e-4, atol=1e-5)
    return sample._replace(phi=augmented @ sample.axes)


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 10.0]))
def test_variables_flatten_the_curvature_at_the_origin(
    dim: int, classes: int, seed: int, prior_precision: float
) -> None:
    """Gradients by the chain rule; with the same p for every image the curvature is a Kronecker product."""
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(40, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (40,), generator=random)
    sample, p = in_float64(phi, classes), torch.full((40, classes), 1 / classes, dtype=torch.float64)
    variables = softmax.variables_at(p, sample, ridge=prior_precision / 40)

    def loss(at: Tensor) -> Tensor:
        return naive.softmax_objective(variables.theta(at), phi, labels, prior_precision)

    v = torch.zeros(classes, dim + 1, dtype=torch.float64)
    _, gradient = softmax.objective(v, phi, labels, prior_precision=prior_precision)
    (expected,) = torch.autograd.grad(loss(v.requires_grad_()), v)
    torch.testing.assert_close(variables.gradient(gradient), expected)
    curvature = torch.autograd.functional.hessian(loss, v.detach()).reshape(v.numel(), -1)
    torch.testing.assert_close(curvature, torch.eye(v.numel(), dtype=torch.float64), rtol=0, atol=1e-8)


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 10.0]), st.sampled_from([0, 1 << 26]))
def test_steps_solve_the_dense_curvature(dim: int, classes: int, seed: int, prior_precision: float, kept: int) -> None:
    """``‖V‖² = vec(θ)ᵀ K vec(θ)`` with the Kronecker product K, and ``C Δ = −gradient`` with the curvature C."""
    random, ridge = torch.Generator().manual_seed(seed), prior_precision / 30
    phi = torch.randn(30, dim, generator=random, dtype=torch.float64)
    theta = torch.randn(classes, dim + 1, generator=random, dtype=torch.float64)
    sample = in_float64(phi, classes)
    p = (torch.cat([phi, torch.ones(30, 1, dtype=phi.dtype)], dim=1) @ theta.T).softmax(1)
    torch.testing.assert_close(sample._replace(phi=sample.phi.float()).probabilities(theta), p.float())
    variables = softmax.variables_at(p, sample, ridge=ridge)
    flat = torch.randn(5, classes * (dim + 1), generator=random, dtype=torch.float64)
    product = naive.softmax_curvature(theta, phi, ridge, axes=sample.axes)
    back = torch.stack([variables.theta(v.view_as(theta)).flatten() for v in flat])
    torch.testing.assert_close(flat.square().sum(1), torch.einsum("ni,ij,nj->n", back, product, back))

    gradient = flat[0].view_as(theta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "INEXACT", 1e-3)
        patch.setattr(softmax, "KEPT_VALUES", kept)
        curvature = softmax.Curvature(theta, softmax.in_float32(phi), variables, ridge=ridge)
        direction = softmax.newton_direction(curvature, variables.gradient(gradient), tolerance=0.0)
    expected = torch.linalg.solve(naive.softmax_curvature(theta, phi, ridge), flat[0])
    error = (variables.theta(direction).flatten() - expected).norm()
    assert error < 0.01 * expected.norm()


@pytest.mark.parametrize("values", [0, 6 * 100, 1 << 24])
def test_memory_limits_lead_to_the_same_minimum(values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = images(400, 5, 4)
    start = torch.zeros(4, 6, dtype=torch.float64)
    weight, _ = softmax.fit_softmax(z, labels, prior_precision=0.1, start=start)
    monkeypatch.setattr(softmax, "SAMPLE_VALUES", values)
    monkeypatch.setattr(softmax, "KEPT_VALUES", values)
    lazy = as_matrix(z).map(lambda block: block.double(), 5, torch.float64)
    few, bias = softmax.fit_softmax(lazy, labels, prior_precision=0.1, start=start)
    assert len(softmax.curvature_sample(z, 4).phi) == min(400, max(1, values // 6))
    torch.testing.assert_close(few, weight, rtol=1e-4, atol=1e-4)
    theta = torch.cat([few, bias[:, None]], dim=1)
    assert softmax.objective(theta, z.double(), labels, prior_precision=0.1)[1].abs().max() < 1e-5


def test_few_examples_for_the_weights_take_few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    (z, y), (z_val, y_val) = images(400, 100, 40), images(200, 100, 40, seed=1)
    passes = 0

    def counted(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        nonlocal passes
        passes += 1
        return objective(*args, **settings)

    objective = softmax.objective
    monkeypatch.setattr(softmax, "objective", counted)
    monkeypatch.setattr(softmax, "SAMPLE_VALUES", 101 * 200)
    softmax.choose_softmax(z, y, z_val, y_val, num_classes=40)
    assert passes <= 60
