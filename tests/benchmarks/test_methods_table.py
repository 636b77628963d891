"""SNGP's score for telling data sets apart."""

from __future__ import annotations

import math

import torch

from benchmarks.paper.methods_table import dempster_shafer


def test_dempster_shafer_formula() -> None:
    logits = torch.tensor([[0.0, 0.0], [3.0, -1.0], [-2.0, -5.0]])
    expected = [2 / (2 + sum(math.exp(value) for value in row)) for row in logits.tolist()]
    torch.testing.assert_close(dempster_shafer(logits), torch.tensor(expected, dtype=torch.float64))


def test_dempster_shafer_of_large_logits() -> None:
    scores = dempster_shafer(torch.tensor([[600.0, 0.0], [500.0, 0.0], [-600.0, -600.0]]))
    assert 0.0 < scores[0] < scores[1] < scores[2] == 1.0
