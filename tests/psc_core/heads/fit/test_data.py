"""Standardisation of features."""

from __future__ import annotations

import torch

from psc_core.heads.fit.data import fit_standardisation


def test_column_that_only_rounds_is_constant() -> None:
    z = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    z[:, 1] = 1e7 + torch.arange(200) % 2
    scale = fit_standardisation(z).inverse_scale
    assert scale[1] == scale[0]
