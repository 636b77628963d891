"""Times of batches by size: a running mean, and what it says of sizes that were not measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.inference.batcher import BatchTimes


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(0.01, 9.0)), max_size=12), st.integers(0, 100))
def test_times_are_those_of_batches_of_about_the_size(steps: list[tuple[int, float]], images: int) -> None:
    times, found = BatchTimes(8), dict[int, float]()
    for size, seconds in steps:
        times.add(size, seconds)
        kind = math.ceil(math.log2(size))
        found[kind] = 0.8 * found[kind] + 0.2 * seconds if kind in found else seconds

    def of(size: int) -> float:
        kind = math.ceil(math.log2(size))
        larger = min((k for k in found if k > kind), default=None)
        if kind in found:
            return found[kind]
        return found[max(found)] if larger is None else found[larger] * size / 2**larger

    sizes = [8] * (images // 8) + [images % 8] * (images % 8 > 0)
    assert times.total(images) == pytest.approx(sum(map(of, sizes)) if found else 0.0)


@given(st.floats(0.0, 9.0), st.floats(0.01, 1.0), st.sampled_from([1, 2, 4]))
def test_fixed_time_is_that_of_a_batch_without_images(fixed: float, each: float, small: int) -> None:
    times = BatchTimes(8)
    times.add(small, fixed + each * small)
    assert times.fixed == 0.0
    times.add(8, fixed + each * 8)
    assert times.fixed == pytest.approx(fixed, abs=1e-9)


def test_no_time_is_fixed_where_large_batches_are_slower_by_the_image() -> None:
    times = BatchTimes(8)
    times.add(1, 1.0)
    times.add(8, 10.0)
    assert times.fixed == 0.0


def test_quicker_device_is_soon_trusted() -> None:
    times = BatchTimes(4)
    for seconds in [1.0] * 30 + [0.1] * 30:
        times.add(4, seconds)
    assert times.total(4) == pytest.approx(0.1, rel=0.02)
