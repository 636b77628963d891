"""Log p-values against a twin that takes one image at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.gates import log_p_pieces
from psc_core.gates import log_p_values as from_pieces
from tests.reference import gates as naive


def log_p_values(ascending: torch.Tensor, scales: torch.Tensor, readings: torch.Tensor) -> torch.Tensor:
    """Of readings (B, G)."""
    return from_pieces(ascending, log_p_pieces(ascending, scales), readings.T.contiguous()).T


FINITE = st.floats(-1e6, 1e6, width=32)


@given(
    known=st.lists(FINITE, min_size=1, max_size=30),
    tested=st.lists(FINITE, min_size=1, max_size=10),
    scale=st.floats(2**-10, 1e4, width=32),
)
def test_matches_the_twin(known: list[float], tested: list[float], scale: float) -> None:
    readings = torch.tensor([*tested, *known])
    ascending = torch.tensor(known).sort().values
    got = log_p_values(ascending[None], torch.tensor([scale]), readings[:, None])[:, 0]
    expected = [naive.log_p_value(ascending.tolist(), scale, reading) for reading in readings.tolist()]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)


@given(known=st.lists(FINITE, min_size=2, max_size=30, unique=True), data=st.data())
def test_falls_without_jumps(known: list[float], data: st.DataObject) -> None:
    ascending = torch.tensor(known).sort().values
    at = data.draw(st.sampled_from(ascending.tolist()))
    below, above = (np.nextafter(np.float32(at), np.float32(end)).item() for end in (-np.inf, np.inf))
    scale = torch.tensor([max(1.0, (ascending[-1] - ascending[0]).item())])
    before, here, after = log_p_values(ascending[None], scale, torch.tensor([[below], [at], [above]]))[:, 0].tolist()
    assert before >= here >= after
    assert here == pytest.approx(math.log((len(known) - ascending.tolist().index(at)) / (len(known) + 1)))


def test_gates_do_not_mix() -> None:
    ascending = torch.tensor([[0.0, 1.0, 2.0], [10.0, 20.0, 30.0]])
    scales, readings = torch.tensor([1.0, 5.0]), torch.tensor([[0.5, 40.0], [5.0, 15.0]])
    both = log_p_values(ascending, scales, readings)
    for gate in range(2):
        alone = log_p_values(ascending[gate : gate + 1], scales[gate : gate + 1], readings[:, gate : gate + 1])
        torch.testing.assert_close(both[:, gate], alone[:, 0])


def test_what_is_not_a_number_stays_so() -> None:
    got = log_p_values(torch.tensor([[0.0, 1.0]]), torch.tensor([1.0]), torch.tensor([[torch.nan], [torch.inf]]))
    assert got[0].isnan() and got[1] == -torch.inf
