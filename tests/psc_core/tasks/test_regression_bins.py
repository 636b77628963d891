"""Bins of numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import DataError
from psc_core.tasks.regression import binned, in_bins, quantile_edges
from tests.psc_core.data.test_dataset import numbers


@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=2, max_size=300).filter(lambda v: min(v) < max(v)))
def test_bins_part_the_numbers(values: list[float]) -> None:
    train, again = binned(numbers(values), numbers(values))
    edges = quantile_edges(torch.tensor(values))
    assert train.labels.tolist() == [sum(value >= edge for edge in edges.tolist()) for value in values]
    counts = train.labels.bincount(minlength=len(train.classes))
    assert 2 <= len(train.classes) <= 10 and int(counts.min()) > 0
    assert len(set(train.classes)) == len(train.classes) == len(edges) + 1
    assert torch.equal(train.labels, again.labels)


def test_many_numbers_fill_bins_alike() -> None:
    train = in_bins(numbers([float(i) for i in range(400)]), quantile_edges(torch.arange(400.0)))
    assert train.labels.bincount().tolist() == [40] * 10
    assert (train.classes[0], train.classes[1], train.classes[-1]) == ("below 40", "40 to 80", "360 and above")


def test_equal_numbers_are_refused() -> None:
    with pytest.raises(DataError, match="all are 4; nothing to fit"):
        quantile_edges(torch.full((30,), 4.0))
