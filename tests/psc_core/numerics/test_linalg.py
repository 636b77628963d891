from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import r2_score
from torch import Tensor

from psc_core import features, linalg
from psc_core.features import chunk_rows
from psc_core.linalg import MomentSums, r_squared, r_squared_error, tail_excess
from tests.reference import checks as naive
from tests.reference import linalg as reference
from tests.reference import projection as reference_moments

SEEDS = st.integers(0, 2**16)


def covariance(rows: int, columns: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    x = scale * torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.T @ x / rows


@given(st.integers(1, 12), st.integers(1, 12), SEEDS)
def test_eigh_reconstructs_matrix_with_descending_values(rows: int, columns: int, seed: int) -> None:
    c = covariance(rows, columns, seed)
    values, vectors = linalg.eigh(c)
    assert torch.all(values.diff() <= 0)
    assert torch.all(values >= 0)
    torch.testing.assert_close((vectors * values) @ vectors.T, c)
    naive = torch.from_numpy(np.linalg.eigvalsh(c.numpy())).clamp(min=0)
    torch.testing.assert_close(values.flip(0), naive, rtol=1e-9, atol=1e-12)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    assert torch.all(largest > 0)


def test_eigh_falls_back_to_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = torch.linalg.eigh, []

    def flaky(matrix: torch.Tensor) -> object:
        calls.append(1)
        if len(calls) == 1:
            raise torch.linalg.LinAlgError("no convergence")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", flaky)
    c = covariance(9, 4, 0)
    values, vectors = linalg.eigh(c)
    torch.testing.assert_close((vectors * values) @ vectors.T, c)
    assert len(calls) == 2


def test_inverse_root_clamps_to_the_floor() -> None:
    inverse = linalg.inverse_root(torch.diag(torch.tensor([4.0, 0.0, 1e-9])))
    assert inverse.n_clamped == 2
    assert inverse.largest_increase == pytest.approx(1e-6)
    expected = torch.tensor([0.5, 1e3, 1e3], dtype=torch.float64)
    torch.testing.assert_close(inverse.root.diag(), expected, rtol=1e-6, atol=0)


@given(st.integers(1, 8), st.integers(1, 12), SEEDS)
def test_inverse_root_equals_naive_loop(columns: int, rows: int, seed: int) -> None:
    c = covariance(rows, columns, seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linalg, "EIGENVALUE_FLOOR", 0.05)
        inverse = linalg.inverse_root(c)
    root, log_det, n_clamped = reference.inverse_root(c.numpy(), 0.05)
    np.testing.assert_allclose(inverse.root.numpy(), root, rtol=0, atol=1e-9)
    assert inverse.log_det == pytest.approx(log_det, rel=1e-9, abs=1e-9)
    assert inverse.n_clamped == n_clamped


def test_chunked_sums_equal_naive_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    x = 1e6 + torch.randn(101, 7, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(features, "CHUNK_ELEMENTS", 50)
    assert [s.stop - s.start for s in chunk_rows(16, 7)] == [7, 7, 2]
    mean = linalg.mean_of_rows(x)
    np.testing.assert_allclose(mean.numpy(), reference.mean_of_rows(x.double().numpy()), rtol=1e-12)
    expected = reference.scatter_about(x.double().numpy(), mean.numpy())
    np.testing.assert_allclose(linalg.scatter_about(x, mean).numpy(), expected, rtol=1e-12, atol=1e-9)


@given(st.integers(1, 8), st.integers(1, 20), SEEDS)
def test_oas_equals_naive_formula(columns: int, rows: int, seed: int) -> None:
    c = covariance(rows, columns, seed)
    shrunk, rho = linalg.oas_shrinkage(c, rows)
    expected, expected_rho = reference.oas_shrinkage(c.numpy(), rows)
    assert rho == pytest.approx(expected_rho, rel=1e-9)
    np.testing.assert_allclose(shrunk.numpy(), expected, rtol=1e-9, atol=1e-12)


def test_oas_of_equal_variances_is_whole() -> None:
    same, whole = linalg.oas_shrinkage(torch.eye(3, dtype=torch.float64), 5)
    assert whole == 1.0
    torch.testing.assert_close(same, torch.eye(3, dtype=torch.float64))
    assert linalg.oas_shrinkage(torch.zeros(3, 3, dtype=torch.float64), 5)[1] == 1.0


@pytest.mark.parametrize(("degrees_of_freedom", "shrunk"), [(30, False), (29, True)])
def test_covariance_of_few_samples_is_shrunk(degrees_of_freedom: int, shrunk: bool) -> None:
    c = covariance(9, 3, 0).numpy()
    expected, intensity = reference.oas_shrinkage(c, degrees_of_freedom) if shrunk else (c, 0.0)
    got, rho = linalg.covariance(degrees_of_freedom * torch.from_numpy(c), degrees_of_freedom)
    assert rho == pytest.approx(intensity)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-12)


def summed_by(barrier: Barrier) -> Callable[[Tensor], Tensor]:
    """An all-reduce over the threads that meet at a barrier: each call returns the sum of what all of them give."""
    given: list[Tensor] = []

    def sum_(tensor: Tensor) -> Tensor:
        given.append(tensor)
        barrier.wait()
        total = torch.stack(given).sum(0)
        if barrier.wait() == 0:
            given.clear()
        barrier.wait()
        return total

    return sum_


@given(
    n=st.integers(1, 12),
    groups=st.integers(1, 3),
    dim=st.integers(1, 5),
    batch=st.integers(1, 12),
    processes=st.integers(1, 3),
    shift=st.sampled_from([0.0, 1e4]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_matches_the_loop(
    n: int, groups: int, dim: int, batch: int, processes: int, shift: float, dtype: torch.dtype, seed: int
) -> None:
    x = torch.randn(processes * n, groups, dim, generator=torch.Generator().manual_seed(seed), dtype=dtype) + shift
    before, barrier = x.clone(), Barrier(processes)
    sum_ = summed_by(barrier)

    def one_process(part: Tensor) -> tuple[int, Tensor, Tensor]:
        try:
            sums = MomentSums(groups, dim)
            for vectors in part.split(batch):
                sums.add(vectors)
            return sums.finish(sum_)
        except Exception:
            barrier.abort()  # The others would wait for this one for ever.
            raise

    with ThreadPoolExecutor(processes) as threads:
        found = [*threads.map(one_process, x.chunk(processes))]
    mean, covariance = reference_moments.moments(x.double())
    for count, got_mean, got_covariance in found:
        assert count == len(x)
        torch.testing.assert_close(got_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_covariance, covariance, rtol=1e-9, atol=1e-9)
    assert torch.equal(x, before)


NUMBERS = st.one_of(st.floats(-50, 50), st.sampled_from([0.0, 0.1, 1e9]))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=2, max_size=20))
def test_equals_its_reference(pairs: list[tuple[float, float]]) -> None:
    y, predicted = torch.tensor(pairs, dtype=torch.float64).T
    found = r_squared((y - predicted).square(), y)
    if float((y - y.mean()).abs().max()) > 1e-6 or bool((y == y[0]).all()):
        assert found == pytest.approx(r2_score(y, predicted), rel=1e-9, abs=1e-9)


def test_error_of_a_difference() -> None:
    y = torch.tensor([0.0, 1.0, 2.0, 3.0]).double()
    good, bad = torch.tensor([0.1, 0.0, 0.1, 0.0]).double(), torch.tensor([1.0, 1.0, 1.0, 1.0]).double()
    assert r_squared(good, y) == pytest.approx(1 - 0.2 / 5) and r_squared(bad, y) == pytest.approx(0.2)
    assert r_squared_error(good, bad, y) == pytest.approx((0.81 + 1 + 0.81 + 1) ** 0.5 / 5)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.0])  # The mean of seven times 0.1 is another number.
def test_equal_numbers_leave_nothing_to_explain(value: float) -> None:
    flat = torch.full((7,), value).double()
    assert (r_squared(0 * flat, flat), r_squared(0 * flat + 1, flat)) == (1.0, 0.0)
    assert r_squared_error(0 * flat, 0 * flat + 1, flat) == 0.0


READINGS = st.lists(st.floats(-1e5, 1e5), min_size=1, max_size=50).map(sorted)


@given(READINGS, st.data())
def test_excess_matches_the_twin(readings: list[float], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(readings)))
    got = tail_excess(torch.tensor([readings, [2 * each for each in readings]], dtype=torch.float64).T, k)
    exact = naive.tail_excess(readings, k)
    assert got.tolist() == pytest.approx([exact, 2 * exact], abs=1e-9)


def test_what_is_exported_is_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    ascending = torch.tensor([[-1.0, 0.0, 0.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
    values = torch.tensor([[-2.0, 0.0, 1.0, torch.nan], [3.0, 2.0, 4.0, torch.inf]])
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    served = [linalg.positions(ascending, values, right=right) for right in (False, True)]
    apart = linalg.distances(x, y), linalg.distances(x.expand(2, 5, 3), y.expand(2, 4, 3))
    root = torch.randn(2, 6, 6, dtype=torch.float64)
    matrix, columns = root @ root.mT + 0.1 * torch.eye(6), torch.randn(2, 6, 3, dtype=torch.float64)
    products = linalg.inner_products(matrix, columns)
    torch.testing.assert_close(products, columns.mT @ torch.linalg.inv(matrix) @ columns)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    torch.testing.assert_close(linalg.inner_products(matrix, columns), products)
    for right in (False, True):
        assert torch.equal(linalg.positions(ascending, values, right=right), served[right])
    torch.testing.assert_close(linalg.distances(x, y), apart[0])
    torch.testing.assert_close(linalg.distances(x.expand(2, 5, 3), y.expand(2, 4, 3)), apart[1])
