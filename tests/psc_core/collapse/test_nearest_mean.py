from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from psc_core.collapse import paired_error
from tests.reference import collapse as reference


@given(st.lists(st.integers(1, 4), min_size=1, max_size=12), st.integers(0, 2**31))
def test_paired_error_equals_twin(labels_each: list[int], seed: int) -> None:
    one, other = torch.randint(0, 2, (2, sum(labels_each)), generator=torch.Generator().manual_seed(seed)).bool()
    counts = torch.tensor(labels_each)
    owners = torch.arange(len(counts)).repeat_interleave(counts)
    error = paired_error(one, other, functional.pad(counts.cumsum(0), (1, 0)))
    assert error == pytest.approx(reference.paired_error(one.tolist(), other.tolist(), owners.tolist()), rel=1e-12)
    if max(labels_each) == 1:
        assert error == pytest.approx(math.sqrt(int((one ^ other).sum())) / len(one), rel=1e-12)
