"""Ridge regressions from sums, beside their definition on whole matrices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import collapse as ridge
from psc_core.collapse import PENALTIES, add_products, count_sketch, fit_ridge
from psc_core.numerics.linalg import r_squared


def summed(x: torch.Tensor, y: torch.Tensor, batch: int = 7) -> torch.Tensor:
    sums = torch.zeros(x.shape[1] + 2, x.shape[1] + 2, dtype=torch.float64)
    for part_x, part_y in zip(x.split(batch), y.split(batch), strict=True):
        add_products(sums, part_x, part_y)
    return sums


def naive(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Predictions by the definition: every penalty tried, hat matrix and all."""
    n, centred = len(x), x - x.mean(0)
    best, prediction = float("inf"), y.mean().expand(n)
    scale = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0).mean()
    for penalty in (PENALTIES * scale).tolist():
        hat = centred @ torch.linalg.solve(centred.T @ centred + penalty * torch.eye(x.shape[1]).double(), centred.T)
        fitted = y.mean() + hat @ (y - y.mean())
        gcv = float((y - fitted).square().sum() / max(float(n - 1 - hat.trace()), 1e-3) ** 2)
        if gcv < best:
            best, prediction = gcv, fitted
    return prediction


@given(st.integers(0, 10_000), st.integers(3, 40), st.integers(1, 6))
def test_equals_its_definition(seed: int, n: int, d: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = 5 + torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = x[:, 0] * 3 + 0.3 * torch.randn(n, generator=generator, dtype=torch.float64)
    fitted = fit_ridge(summed(x, y))
    ours, theirs = fitted(x), naive(x, y)
    left = [float((y - prediction).square().sum()) for prediction in (ours, theirs)]
    assert left[0] == pytest.approx(left[1], rel=1e-3, abs=1e-6)
    if n > 3 * d:
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)


def test_constant_features_predict_the_mean() -> None:
    y = torch.arange(9.0).double()
    fitted = fit_ridge(summed(torch.full((9, 3), 2.0).double(), y))
    torch.testing.assert_close(fitted(torch.ones(2, 3).double()), torch.full((2,), 4.0).double(), atol=1e-9, rtol=0)


def test_narrow_features_are_not_sketched() -> None:
    x = torch.randn(3, 8)
    assert torch.equal(count_sketch(8)(x), x.double())


def test_a_sketch_keeps_a_linear_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ridge, "SKETCH", 64)
    generator = torch.Generator().manual_seed(0)
    low = torch.randn(2000, 5, generator=generator)
    x = low @ torch.randn(5, 4000, generator=generator)
    sketch, y = count_sketch(4000), low[:, 0].double()
    fitted = fit_ridge(summed(sketch(x[:1000]), y[:1000]))
    errors = (fitted(sketch(x[1000:])) - y[1000:]).square()
    assert r_squared(errors, y[1000:]) > 0.99
    once = sketch(torch.eye(4000)).abs()
    assert (once.sum(1) == 1).all() and (once.sum(0) > 20).all(), "each feature is added to one column"
    whole = sketch(torch.eye(4000)).T @ x[0].double()
    torch.testing.assert_close(sketch(x[:1])[0], whole, atol=2e-3, rtol=1e-4)
