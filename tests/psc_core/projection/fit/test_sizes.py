"""The measured sizes do not depend on how many columns are taken at a time."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import FitSettings, fit_projection
from psc_core import projection as fit_tucker
from psc_core import projection as sizes
from tests import tiny
from tests.psc_core.collapse.support import measured
from tests.psc_core.fitting.support import counted, typical

SETTINGS = FitSettings(device="cpu")


def test_column_ranges_give_the_same(data_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Class means beyond the budget are taken a range of columns at a time, in passes of their own."""
    net = tiny.network().eval()
    (train, reads), (val, _) = counted(data_root, "train"), counted(data_root, "val")
    candidate = measured(net, train, val, replace(SETTINGS, layers="^4$")).candidate("4")
    whole = fit_projection(net, candidate, train, val, minimum_dim=8, settings=SETTINGS).report
    monkeypatch.setattr(sizes, "MIN_COLUMNS", 100)
    monkeypatch.setattr(fit_tucker, "reduced_positions", lambda channels, positions, budget: positions)
    reads.clear()
    few = replace(SETTINGS, max_memory=8 * 10 * 100)
    parts = fit_projection(net, candidate, train, val, minimum_dim=8, settings=few).report
    assert typical(reads) == 1 + 3, "16 channels × 16 positions in ranges of 100 columns"
    assert parts.scaled_nc1 == pytest.approx(whole.scaled_nc1, rel=1e-9)
    assert parts.scaled_nc4 == whole.scaled_nc4
    assert torch.equal(parts.nc1, whole.nc1) and torch.equal(parts.nc4, whole.nc4)
