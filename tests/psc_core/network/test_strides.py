"""A network gives the same values for channels-last images, or keeps contiguous ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from psc_core.network.cut import cut_graph, truncate
from psc_core.network.fuse import reads_strides, reshape_views

LAST, FIRST = torch.channels_last, torch.contiguous_format
Wire = Callable[[Tensor], Tensor]


class Wired(nn.Module):
    """A convolution, and what a test makes of its output: (batch, 4, 6, 6) to (batch, 144)."""

    def __init__(self, wire: Wire | nn.Module) -> None:
        super().__init__()
        self.conv, self.wire, self.head = nn.Conv2d(3, 4, 3, padding=1), wire, nn.Linear(144, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.wire(self.conv(x).relu()))
        return logits


def view_size(x: Tensor) -> Tensor:
    return x.view(x.size(0), -1)


def view_as(x: Tensor) -> Tensor:
    return x.view_as(x.new_zeros(x.shape).flatten(1))


def grouped(x: Tensor) -> Tensor:
    """Average each channel, as squeeze and excitation do, then mix the channels of two groups."""
    gate = F.relu(x.mean((2, 3)).view(-1, 4), inplace=True).view(-1, 4, 1, 1)
    return (x * gate).view(-1, 2, 2, 6, 6).transpose(1, 2).reshape(-1, 144)


def changed_at_the_end(x: Tensor) -> Tensor:
    return F.relu(x.view(-1, 144), inplace=True)


def changed_copy(x: Tensor) -> Tensor:
    """The flattened map is a view of ``x`` only where ``x`` is contiguous."""
    return x.flatten(1).mul_(2) + x.permute(0, 1, 3, 2).flatten(1)


def written_into(x: Tensor) -> Tensor:
    flat = x.reshape(-1, 144)
    torch.mul(flat, 2, out=flat)
    return flat + x.permute(0, 1, 3, 2).flatten(1)


def by_strides(x: Tensor) -> Tensor:
    return torch.as_strided(x, (x.shape[0], 144), (144, 1)).clone()


def named(x: Tensor) -> Tensor:
    return x.view(size=(x.shape[0], 144))


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32).view(torch.float32).flatten(1)


def wrapped(x: Tensor) -> Tensor:
    return x.view(len(x), -1)


fx.wrap("wrapped")


def opaque(x: Tensor) -> Tensor:
    return wrapped(x)


@pytest.mark.parametrize(
    ("wire", "memory_format"),
    [
        (view_size, LAST),
        (view_as, LAST),
        (grouped, LAST),
        (changed_at_the_end, LAST),
        (nn.Sequential(nn.Flatten(), nn.Dropout(inplace=True)), LAST),
        (nn.Sequential(nn.LocalResponseNorm(3), nn.Flatten()), LAST),
        (nn.Sequential(nn.PixelShuffle(2), nn.PixelUnshuffle(2), nn.ChannelShuffle(2), nn.Flatten()), LAST),
        (nn.Sequential(nn.Flatten(), nn.Unflatten(1, (12, 12)), nn.Flatten()), LAST),
        (changed_copy, FIRST),
        (written_into, FIRST),
        (by_strides, FIRST),
        (named, FIRST),
        (bits, FIRST),
        (opaque, FIRST),
    ],
)
@torch.inference_mode()
def test_the_values_stay(wire: Wire | nn.Module, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    net, images = Wired(wire).eval(), torch.randn(3, 3, 6, 6)
    expected = net(images)
    backbone = truncate(net, ["conv"], keep_output=True)
    fused = backbone.fused("fp32")
    assert fused.memory_format == memory_format
    for batch in (images, images[:1]):
        got = fused(batch)[1]
        assert got is not None
        torch.testing.assert_close(got, expected[: len(batch)], rtol=0, atol=1e-5)


@torch.inference_mode()
def test_the_values_stay_in_half_precision() -> None:
    torch.manual_seed(0)
    net, images = Wired(view_size).eval(), torch.randn(3, 3, 6, 6)
    fused = truncate(net, ["conv"], keep_output=True).fused("bf16")
    with torch.autocast("cpu", torch.bfloat16):
        got = fused(images)[1]
    assert got is not None and fused.memory_format == LAST
    torch.testing.assert_close(got.float(), net(images), rtol=0.05, atol=0.05)


class Attending(nn.Module):
    """Attention over the positions of a map, without its own layout of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.attention, self.head = nn.Conv2d(3, 8, 3), nn.MultiheadAttention(8, 2), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.conv(x).flatten(2).permute(2, 0, 1)
        logits: Tensor = self.head(self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(0))
        return logits


@torch.inference_mode()
def test_attention_over_a_map() -> None:
    torch.manual_seed(0)
    net, images = Attending().eval(), torch.randn(3, 3, 6, 6)
    fused = truncate(net, ["conv"], keep_output=True).fused("fp32")
    assert fused.memory_format == LAST
    torch.testing.assert_close(fused(images)[1], net(images))


def test_only_shapes_become_reshapes() -> None:
    body = cut_graph(Wired(view_size).eval(), ["conv"], keep_output=True)
    assert not reads_strides(body)
    reshape_views(body)
    assert [len(body.graph.find_nodes(op="call_method", target=name)) for name in ("view", "reshape")] == [0, 1]
    for wire in (named, bits):
        body = cut_graph(Wired(wire).eval(), ["conv"], keep_output=True)
        reshape_views(body)
        assert body.graph.find_nodes(op="call_method", target="view") and reads_strides(body)
