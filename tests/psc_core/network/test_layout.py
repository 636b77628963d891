from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psc_core.network.layers import Layout, canonical, layout_of


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_canonical_equals_naive_loop(batch: int, channels: int, height: int, width: int) -> None:
    grid = torch.arange(batch * channels * height * width, dtype=torch.float32).reshape(batch, channels, height, width)
    wanted = torch.empty(batch, channels, height * width)
    for r in range(height):
        for c in range(width):
            wanted[:, :, r * width + c] = grid[:, :, r, c]
    assert torch.equal(canonical(grid, "map"), wanted)
    assert torch.equal(canonical(grid.permute(0, 2, 3, 1), "map_last"), wanted)
    assert torch.equal(canonical(wanted.transpose(1, 2), "tokens"), wanted)
    assert torch.equal(canonical(wanted[:, :, 0], "vector"), wanted[:, :, :1])


def test_token_blocks_with_convolutions() -> None:
    """Patches ahead of a transformer, convolutions along its tokens, and a sum of tokens: CoaT's last layer."""
    embedding = nn.Sequential(nn.Conv2d(3, 6, 4), nn.Flatten(2))
    mixing = nn.Sequential(nn.Conv1d(9, 9, 1), nn.LayerNorm(6), nn.Linear(6, 6))
    projected = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(16))
    assert layout_of(embedding, "").form((2, 16, 6)) == "tokens"
    assert layout_of(mixing, "").form((2, 9, 6)) == "tokens"
    assert layout_of(projected, "").form((2, 16, 9)) == "tokens"
    assert layout_of(nn.Conv1d(3, 1, 1), "").form((2, 1, 16)) == "tokens"
    assert layout_of(nn.Sequential(nn.Linear(6, 6), nn.Conv1d(6, 9, 1)), "").form((2, 9, 16)) == "map"


class FirstNorm(nn.LayerNorm):
    """Over the channels of a map (B, C, H, W), by turning it around."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class LastNorm(nn.LayerNorm):
    """In float32, over the last axis."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.float()).to(input.dtype)


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (nn.LayerNorm(6), "map_last"),
        (LastNorm(6), "map_last"),
        (nn.RMSNorm(6), "map_last"),
        (FirstNorm(6), "map"),
        (nn.LayerNorm((6, 4, 5)), "map"),
    ],
)
def test_normalisation_reveals_channel_axis(norm: nn.Module, kind: str) -> None:
    shape = (2, 6, 4, 5) if kind == "map" else (2, 4, 5, 6)
    assert norm(torch.zeros(shape)).shape == shape
    assert layout_of(norm, "").form(shape) == kind
    assert layout_of(nn.Sequential(nn.Identity(), norm), "").form(shape) == kind


@given(st.lists(st.integers(1, 9), min_size=4, max_size=4))
def test_layout_gives_a_map_for_four_dimensions(shape: list[int]) -> None:
    for convolves in (False, True):
        for widths in (frozenset[int](), frozenset({3, 5})):
            assert Layout(convolves, widths, frozenset({2})).form(shape) in ("map", "map_last")


def test_layout_by_rank() -> None:
    layout = Layout(True, frozenset(), frozenset())
    assert [layout.form(shape) for shape in ((2, 3), (2, 3, 4), (2,), (2, 3, 4, 5, 6))] == [
        "vector",
        "tokens",
        None,
        None,
    ]


def test_concatenated_convolutions_are_channels_first() -> None:
    """A dense block's 256 channels are no convolution's width, its 32-pixel rows are."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32))
    assert layout_of(net, "").form((2, 256, 24, 32)) == "map"
