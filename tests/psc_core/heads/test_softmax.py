"""Logistic regression against autograd and brute force."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_walk_reports_its_progress(capsys: pytest.CaptureFixture[str]) -> None:
    """With the features of a wide layer it takes minutes, and the fit would look as if it hung."""
    z, labels = images(40, 5, 3)
    softmax.choose_softmax(z, labels, z, labels, num_classes=3)
    assert re.fullmatch(r"head (\d)/\1 \(.*\)\n", capsys.readouterr().err)
    softmax.choose_softmax(z, labels, z, labels, num_classes=3, finish=False)
    assert not capsys.readouterr().err
