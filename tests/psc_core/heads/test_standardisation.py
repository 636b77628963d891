"""Standardisation of features."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.errors import FitError
from psc_core.heads.base import fit_standardisation
from tests.psc_core.heads.classifiers import SEEDS
from tests.reference import heads as naive


def test_column_that_only_rounds_is_constant() -> None:
    z = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    z[:, 1] = 1e7 + torch.arange(200) % 2
    scale = fit_standardisation(z).inverse_scale
    assert scale[1] == scale[0]


def test_a_layer_that_only_rounds_is_constant() -> None:
    """Beside another; of its columns some have a mean of zero, but the rounding of the others."""
    random = torch.Generator().manual_seed(0)
    z = 1e-3 * torch.randn(200, 8, generator=random)
    steps = torch.randint(-4, 5, (200, 5), generator=random) * torch.finfo(torch.float32).eps
    z[:, 3:] = torch.tensor([1.0, -1.0, 1.0, 1.0, 0.0]) + steps
    scale = fit_standardisation(z, [3, 5]).inverse_scale
    assert (scale[3:] == scale[:3].min()).all()
    with pytest.raises(FitError, match="equal"):
        fit_standardisation(z[:, 3:])


@given(st.integers(2, 30), st.integers(1, 6), SEEDS, st.sampled_from([1e-3, 1.0, 1e3]))
def test_standardisation_matches_loops(n: int, dim: int, seed: int, scale: float) -> None:
    random = torch.Generator().manual_seed(seed)
    z = scale * torch.randn(n, dim, generator=random, dtype=torch.float64)
    z[:, 1:2] = 5 * scale  # a constant column
    torch.testing.assert_close(fit_standardisation(z)(z)[:], naive.standardise(z))
