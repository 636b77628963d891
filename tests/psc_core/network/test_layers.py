from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psc_core.errors import NetworkError, UsageError
from psc_core.network.cut import truncate
from psc_core.network.layers import LayerInfo, Layout, canonical, layout_of, list_layers, select_layers
from psc_core.network.load import load_network

TRIAL = torch.randn(1, 1, 8, 8)


def network(name: str, **model_args: Any) -> nn.Module:
    torch.manual_seed(0)
    return load_network(f"torchvision:{name}", num_classes=10, model_args=model_args)


def by_name(layers: list[LayerInfo]) -> dict[str, LayerInfo]:
    return {layer.name: layer for layer in layers}


def test_operations_of_residual_network() -> None:
    net = network("resnet18", stem="small", in_channels=1)
    layers = list_layers(net, torch.randn(1, 1, 28, 28))
    names = [layer.name for layer in layers]
    assert names[:3] == ["conv1", "layer1.0.conv1", "layer1.0.conv2"]
    assert len([name for name in names if "conv" in name]) == 17
    assert len([name for name in names if "downsample" in name]) == 3
    assert names[-2:] == ["avgpool", "fc"]
    assert [layer.index for layer in layers] == list(range(22))
    found = by_name(layers)
    assert (found["layer3.0.conv1"].form, found["layer3.0.conv1"].shape) == ("map", (256, 49))
    assert found["layer3.0.conv1"].grid == (7, 7)
    assert [layer.role for layer in layers[-3:]] == ["hidden", "penultimate", "output"]


def test_operations_of_a_plain_network() -> None:
    net = network("vgg11_bn", stem="small")
    layers = list_layers(net, torch.randn(1, 3, 32, 32))
    assert [layer.name for layer in layers[:4]] == ["features.0", "features.3", "features.4", "features.7"]
    assert layers[1].shape == (64, 256)


@pytest.mark.parametrize(
    ("name", "args", "size", "blocks", "layer", "kind", "shape"),
    [
        ("convnext_tiny", {}, 32, 18, "features.1.0", "map", (96, 64)),
        ("vit_b_16", {"image_size": 32}, 32, 12, "encoder.layers.encoder_layer_3", "tokens", (768, 5)),
        ("swin_t", {}, 32, 12, "features.1.1", "map_last", (96, 64)),
        ("resnet18", {}, 64, 8, "layer2.0", "map", (128, 64)),
        ("mobilenet_v2", {}, 32, 17, "features.2", "map", (24, 64)),
    ],
)
def test_blocks(
    name: str, args: dict[str, Any], size: int, blocks: int, layer: str, kind: str, shape: tuple[int, int]
) -> None:
    layers = list_layers(network(name, **args), torch.randn(1, 3, size, size), granularity="blocks")
    assert len([entry for entry in layers if entry.role in ("hidden", "trunk")]) == blocks
    assert (by_name(layers)[layer].form, by_name(layers)[layer].shape) == (kind, shape)
    assert layers[-1].role == "penultimate"


def test_a_convolution_with_its_normalisation_is_no_block() -> None:
    def convolution() -> nn.Module:
        unit = nn.Module()
        unit.convolution, unit.normalisation = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        unit.forward = lambda x: unit.normalisation(unit.convolution(x))
        return unit

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(convolution(), convolution())

        def forward(self, x: Tensor) -> Tensor:
            return x + self.layer(x)

    net = nn.Sequential(nn.Sequential(Residual(), Residual()), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    names = [layer.name for layer in list_layers(net, torch.randn(1, 3, 8, 8), granularity="blocks")]
    assert names[:2] == ["0.0", "0.1"]


class Sequences(nn.Module):
    """Tokens, then channels first: the end of Microsoft's Swin, and one-dimensional layers behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.norm = nn.Conv2d(1, 6, 4, 4), nn.LayerNorm(6)
        self.line = nn.Sequential(nn.Conv1d(6, 5, 1), nn.BatchNorm1d(5), nn.ReLU(), nn.MaxPool1d(2))
        self.avgpool, self.head = nn.AdaptiveAvgPool1d(1), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.patch(x).flatten(2).transpose(1, 2))
        return self.head(self.avgpool(self.line(x.transpose(1, 2))).flatten(1))


def test_one_dimensional_layers_are_channels_first() -> None:
    net, trial = Sequences(), torch.randn(1, 1, 16, 16)
    found = by_name(list_layers(net, trial, granularity="all"))
    assert (found["norm"].form, found["norm"].shape) == ("tokens", (6, 16))
    for name in ("line.0", "line.1", "line.2"):
        assert (found[name].form, found[name].shape, found[name].grid) == ("map", (5, 16), (16,))
    for name in ("line.3", "line"):
        assert (found[name].form, found[name].shape) == ("map", (5, 8))
    assert (found["avgpool"].form, found["avgpool"].shape) == ("map", (5, 1))
    assert found["avgpool"].role == "penultimate"
    (features,), _ = truncate(net, ["avgpool"], keep_output=False, trial=trial)(trial)
    assert features.shape == (1, 5, 1)


class FunctionalPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shared(self.shared(self.conv(x)).relu())
        return self.head(x.mean((2, 3)))


def test_lists_input_of_output_layer() -> None:
    layers = list_layers(FunctionalPool(), torch.randn(1, 1, 8, 8))
    assert [layer.name for layer in layers] == ["conv", "shared", "head:input", "head"]
    assert (layers[2].role, layers[2].shape) == ("penultimate", (3, 1))


@pytest.mark.parametrize("width", [4, 5])
def test_a_head_that_runs_after_the_logits_is_no_layer(width: int) -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(1, 3, 3), nn.AdaptiveAvgPool2d(1)
            self.kind, self.colour = nn.Linear(3, 4), nn.Linear(3, width)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            x = self.pool(self.conv(x)).flatten(1)
            return {"kind": self.kind(x), "colour": self.colour(x)}

    class Kind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = TwoHeads()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)["kind"]

    for granularity in ("operations", "all"):
        layers = list_layers(Kind(), torch.randn(1, 1, 8, 8), granularity=granularity)
        expected = [("net.conv", "trunk"), ("net.pool", "penultimate"), ("net.kind", "output")]
        assert [(layer.name, layer.role) for layer in layers] == expected


def test_module_is_listed_at_last_call() -> None:
    class Again(FunctionalPool):
        def forward(self, x: Tensor) -> Tensor:
            x = self.shared(self.conv(x))
            return self.head(self.shared(x).mean((2, 3)))

    net = nn.Sequential(nn.Identity(), Again())
    assert [layer.name for layer in list_layers(net, torch.randn(1, 1, 8, 8))][:2] == ["1.conv", "1.shared"]


def test_a_shared_activation_is_held_at_its_last_call() -> None:
    class Shared(nn.Module):
        def __init__(self, *, skips: bool) -> None:
            super().__init__()
            self.first, self.second, self.act, self.head = (
                nn.Conv2d(3, 4, 3),
                nn.Conv2d(4, 8, 3),
                nn.ReLU(),
                nn.Linear(8, 5),
            )
            self.skips = skips

        def forward(self, x: Tensor) -> Tensor:
            first = self.act(self.first(x))
            last = self.act(self.second(first)).mean((2, 3))
            return self.head(last + first.mean((1, 2, 3))[:, None] if self.skips else last)

    for skips, role in ((False, "trunk"), (True, "hidden")):
        found = by_name(list_layers(Shared(skips=skips), torch.randn(1, 3, 8, 8), granularity="all"))
        assert (found["act"].shape, found["act"].role) == ((8, 16), role)


def test_ignores_outputs_without_batch_axis() -> None:
    class Windowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.table = nn.Linear(2, 2)
            self.head = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            windows = self.inner(x.flatten(1).reshape(-1, 4))
            return self.head(windows.reshape(len(x), 16)) + self.table(torch.ones(1, 2))

    assert [layer.name for layer in list_layers(Windowed(), torch.randn(1, 1, 4, 4))] == ["head:input", "head"]


def test_linear_classifier_reads_its_input() -> None:
    layers = list_layers(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.randn(1, 1, 2, 2))
    assert [(layer.name, layer.role) for layer in layers] == [("1:input", "penultimate"), ("1", "output")]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_canonical_equals_naive_loop(batch: int, channels: int, height: int, width: int) -> None:
    grid = torch.arange(batch * channels * height * width, dtype=torch.float32).reshape(batch, channels, height, width)
    expected = torch.empty(batch, channels, height * width)
    for r in range(height):
        for c in range(width):
            expected[:, :, r * width + c] = grid[:, :, r, c]
    assert torch.equal(canonical(grid, "map"), expected)
    assert torch.equal(canonical(grid.permute(0, 2, 3, 1), "map_last"), expected)
    assert torch.equal(canonical(expected.transpose(1, 2), "tokens"), expected)
    assert torch.equal(canonical(expected[:, :, 0], "vector"), expected[:, :, :1])


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
            layout = Layout(convolves, widths, frozenset({2}))
            assert [layout.form(shape[:rank]) for rank in (1, 2)] == [None, "vector"]
            assert layout.form(shape) in ("map", "map_last")


def test_concatenated_convolutions_are_channels_first() -> None:
    """A dense block's 256 channels are no convolution's width, its 32-pixel rows are."""
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32))
    assert layout_of(net, "").form((2, 256, 24, 32)) == "map"


FORMS: dict[tuple[str, int, str], dict[str, tuple[str, tuple[int, int]]]] = {
    ("torchvision:convnext_tiny", 32, "operations"): {
        "features.1.0.block.0": ("map", (96, 64)), "features.1.0.block.3": ("map_last", (384, 64)),
    },
    ("torchvision:swin_t", 64, "all"): {
        "features.0.0": ("map", (96, 256)), "features.0": ("map_last", (96, 256)),
        "features.1.0.mlp.1": ("map_last", (384, 256)), "permute": ("map", (768, 4)),
    },
    ("timm:mambaout_femto", 32, "all"): {
        "stages.0.blocks.0.norm": ("map_last", (48, 64)), "stages.0.blocks.0": ("map_last", (48, 64)),
    },
    ("timm:convnext_atto", 32, "all"): {
        "stages.0.blocks.0.norm": ("map", (40, 64)), "stages.1.downsample.0": ("map", (40, 64)),
    },
}  # fmt: skip


@pytest.mark.parametrize(("spec", "size", "granularity"), FORMS)
def test_the_axis_of_the_channels(spec: str, size: int, granularity: str) -> None:
    pytest.importorskip(spec.partition(":")[0])
    layers = list_layers(load_network(spec, num_classes=3), torch.randn(1, 3, size, size), granularity=granularity)
    found = by_name(layers)
    expected = FORMS[spec, size, granularity]
    assert {name: (found[name].form, found[name].shape) for name in expected} == expected


class Looks(FunctionalPool):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("stage5")


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (lambda layers: select_layers(layers, "layer9"), "no layer name matches"),
        (lambda layers: select_layers(layers, "("), "regular expression"),
        (lambda _: list_layers(FunctionalPool(), TRIAL, granularity="fine"), "operations, blocks, all"),
        (lambda _: list_layers(FunctionalPool(), TRIAL, granularity="blocks"), "no layers of granularity 'blocks'"),
        (lambda _: list_layers(Looks(), TRIAL), r"shape \(1, 1, 8, 8\): KeyError: 'stage5'"),
        (lambda _: list_layers(FunctionalPool(), torch.randn(1, 3, 8, 8)), r"shape \(1, 3, 8, 8\)"),
        (lambda _: list_layers(nn.Sequential(nn.Conv2d(1, 2, 1)), TRIAL), "returns logits"),
    ],
)
def test_what_cannot_be_listed_is_refused(use: Callable[[list[LayerInfo]], object], said: str) -> None:
    layers = list_layers(FunctionalPool(), TRIAL)
    assert [layer.index for layer in select_layers(layers, "^shared$")] == [1]
    with pytest.raises((NetworkError, UsageError), match=said):
        use(layers)
