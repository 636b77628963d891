"""Moments of groups of vectors against a loop, in one process and in several."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core.numerics.linalg import MomentSums
from tests.reference import projection as reference


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
    mean, covariance = reference.moments(x.double())
    for count, got_mean, got_covariance in found:
        assert count == len(x)
        torch.testing.assert_close(got_mean, mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(got_covariance, covariance, rtol=1e-9, atol=1e-9)
    assert torch.equal(x, before)
