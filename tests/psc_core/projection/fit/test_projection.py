"""Sizes that a projection may be given, and the errors for others."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from psc_core import FitSettings, fit_projection, open_dataset
from psc_core import projection as fit_tucker
from psc_core.collapse import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError
from psc_core.images.preprocess import PRESETS
from psc_core.projection import reduced_positions
from tests import tiny

CANDIDATE = Candidate(("2",), "16 channels, 7 × 7 positions")
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tiny.network().eval()


@pytest.fixture(scope="module")
def train(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"]).subset(torch.arange(200))


@pytest.mark.parametrize(("components", "limit"), [(64, 10), (8, 1)])
def test_error_names_the_d_proj_that_would_do(
    net: torch.nn.Module, train: ImageDataset, monkeypatch: pytest.MonkeyPatch, components: int, limit: int
) -> None:
    """d components span d (d + 1) / 2 channel components; as many as fit are measured unless more are given."""
    monkeypatch.setattr(fit_tucker, "MAX_COMPONENTS", components)
    with pytest.raises(FitError, match=rf"c_proj in 1…{limit} .* got 16; give d_proj too, at least 6"):
        fit_projection(net, CANDIDATE, train, c_proj=16, settings=SETTINGS)
    fitted = fit_projection(net, CANDIDATE, train, c_proj=16, d_proj=6, settings=SETTINGS)
    assert (fitted.report.c_proj, fitted.report.d_proj) == (16, 6)


def test_rejects_more_components_than_the_layer_has(net: torch.nn.Module, train: ImageDataset) -> None:
    with pytest.raises(FitError, match=r"c_proj in 1…16 for this layer, got 17"):
        fit_projection(net, CANDIDATE, train, c_proj=17, d_proj=6, settings=SETTINGS)
    with pytest.raises(FitError, match=r"d_proj in 1…49 for this layer, got 50"):
        fit_projection(net, CANDIDATE, train, d_proj=50, settings=SETTINGS)


def test_rejects_more_components_than_channels_vary_in(net: torch.nn.Module, train: ImageDataset) -> None:
    """The correlations of two positions have one number that differs, beside the ones on their diagonal."""
    pooled = torch.nn.Sequential(
        *[*net.children()][:3], torch.nn.AdaptiveAvgPool2d((1, 2)), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    )
    candidate = Candidate(("3",), "16 channels, 1 × 2 positions")
    with pytest.raises(FitError, match=r"c_proj in 1…2, for the channels of this layer vary in no more ways, got 3"):
        fit_projection(pooled, candidate, train, c_proj=3, d_proj=2, settings=SETTINGS)


@given(st.integers(1, 2048), st.integers(1, 224), st.integers(1 << 14, 1 << 30), st.booleans())
def test_reduced_size_is_the_largest_that_fits(channels: int, side: int, budget: int, square: bool) -> None:
    assume(square or math.isqrt(side) ** 2 != side)
    sides = [side >> k for k in range(side.bit_length())]
    sizes = [length**2 for length in sides] if square else sides
    fitting = [size for size in sizes if channels * size**2 * 8 <= budget]
    assert reduced_positions(channels, sizes[0], budget) == max(fitting, default=1)
