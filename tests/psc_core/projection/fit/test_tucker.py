"""Factors: orthonormal, ordered, repeatable, and exact where the tensor has low rank."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.projection import ITERATIONS, tucker_factors
from tests.reference import projection as naive


def correlation_of(channels: int, d: int, rank_c: int, rank_d: int, seed: int) -> torch.Tensor:
    """Symmetric slices that span rank_c channel and rank_d spatial directions."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(channels, rank_c, generator=generator, dtype=torch.float64)
    basis = torch.randn(rank_c, d, rank_d, generator=generator, dtype=torch.float64)
    shared = torch.linalg.qr(torch.randn(d, rank_d, generator=generator, dtype=torch.float64))[0]
    core = torch.einsum("rdk,rek->rde", basis, basis)
    return torch.einsum("cr,rde->cde", weights, shared @ (shared.T @ core @ shared) @ shared.T)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 50))
def test_factors_are_orthonormal_and_repeatable(channels: int, d: int, seed: int) -> None:
    tensor = correlation_of(channels, d, min(3, channels), d, seed)
    a, b = tucker_factors(tensor, channels, d)
    torch.testing.assert_close(a.T @ a, torch.eye(a.shape[1], dtype=torch.float64), atol=1e-8, rtol=0)
    torch.testing.assert_close(b.T @ b, torch.eye(b.shape[1], dtype=torch.float64), atol=1e-8, rtol=0)
    again = tucker_factors(tensor.clone(), channels, d)
    assert torch.equal(a, again[0])
    assert torch.equal(b, again[1])


def test_reconstructs_a_low_rank_tensor() -> None:
    tensor = correlation_of(8, 9, 2, 3, seed=1)
    a, b = tucker_factors(tensor, 2, 3)
    core = torch.einsum("cde,cp,dq,er->pqr", tensor, a, b, b)
    rebuilt = torch.einsum("pqr,cp,dq,er->cde", core, a, b, b)
    torch.testing.assert_close(rebuilt, tensor, atol=1e-9, rtol=1e-9)


@given(st.integers(2, 6), st.integers(2, 6), st.integers(0, 50))
def test_factors_match_the_naive_iteration(channels: int, d: int, seed: int) -> None:
    """The same subspaces where the tensor has them, under noise of a thousandth."""
    rank = min(2, channels)
    tensor = correlation_of(channels, d, rank, 2, seed)
    noise = torch.randn(channels, d, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    tensor += 1e-3 * tensor.abs().max() * (noise + noise.transpose(1, 2))
    a, b = tucker_factors(tensor, rank, 2)
    captured, expected = (
        torch.einsum("cde,cp,dq,er->pqr", tensor, *factors, factors[1]).square().sum()
        for factors in ((a, b), naive.tucker(tensor, rank, 2, ITERATIONS))
    )
    torch.testing.assert_close(captured, expected, rtol=1e-5, atol=0)


def test_one_channel_is_an_eigendecomposition() -> None:
    x = torch.randn(200, 6, dtype=torch.float64) @ torch.randn(6, 6, dtype=torch.float64)
    matrix = torch.corrcoef(x.T)
    a, b = tucker_factors(matrix[None], 5, 3)
    values, vectors = torch.linalg.eigh(matrix)
    assert a.shape == (1, 1)
    leading = vectors[:, values.argsort(descending=True)[:3]]
    torch.testing.assert_close((b.T @ leading).abs(), torch.eye(3, dtype=torch.float64), atol=1e-8, rtol=0)


def test_no_column_is_rounding() -> None:
    """Of four positions the slices of a correlation span seven dimensions, whatever the number of channels."""
    x = torch.randn(500, 64, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x += torch.randn(500, 64, 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = (x - x.mean(0)) / x.std(0, correction=0)
    tensor = torch.einsum("ncd,nce->cde", x, x) / len(x)
    a, b = tucker_factors(tensor, 32, 4)
    assert (a.shape, b.shape) == ((64, 7), (4, 4))
    order = torch.randperm(500, generator=torch.Generator().manual_seed(2))
    other = torch.einsum("ncd,nce->cde", x[order], x[order]) / len(x)  # Equal up to rounding.
    for mine, theirs in zip((a, b), tucker_factors(other, 32, 4), strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=0)
