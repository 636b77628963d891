"""The paper's networks have the published sizes, and spectral normalisation keeps its bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.networks import (
    NETWORKS,
    AverageShortcut,
    SpectralBound,
    bound_spectral_norm,
    fold_spectral_norm,
    wide_resnet10_1,
)
from psc_core.network.cut import truncate
from psc_core.network.layers import list_layers

PARAMETERS = {
    "resnet18": 11_173_962,
    "resnet18_narrow": 701_466,
    "resnet50": 23_520_842,
    "wide_resnet28_10": 36_479_194,
    "vgg16": 14_728_266,
    "vgg16_narrow": 924_186,
    # patches of 4 × 4 × 3, class token and 65 positions; six blocks; the last normalisation and the output
    "vit_narrow": 49 * 96 + 96 + 65 * 96 + 6 * (4 * 96 + 97 * 288 + 97 * 96 + 97 * 192 + 193 * 96) + 2 * 96 + 97 * 10,
    # without the 1×1 convolutions of the shortcuts: 8,192 + 32,768 + 131,072 weights and 1,792 of batch normalisation
    "resnet18_mod": 11_173_962 - 173_824,
    "wide_resnet28_10_mod": 36_479_194 - 16 * 160 - 160 * 320 - 320 * 640,
}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_networks_have_the_published_sizes(name: str, side: int, channels: int) -> None:
    with torch.device("meta"):
        net = NETWORKS[name](10, channels)
        assert net.eval()(torch.empty(2, channels, side, side)).shape == (2, 10)
    if channels == 3:
        assert sum(p.numel() for p in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize(("stride", "side"), [(1, 5), (2, 6), (2, 7)])
def test_shortcut_of_mod_equals_loops(stride: int, side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(0))
    found = AverageShortcut(nn.Conv2d(3, 5, 1, stride))(x)
    small = -(-side // stride)
    assert found.shape == (2, 5, small, small) and bool((found[:, 3:] == 0).all())
    window = stride if side % 2 == 0 else 1
    for i in range(small):
        for j in range(small):
            pixels = x[:, :, i * stride : i * stride + window, j * stride : j * stride + window]
            torch.testing.assert_close(found[:, :3, i, j], pixels.mean((2, 3)))


@pytest.mark.parametrize("name", ["resnet18_mod", "resnet50_mod", "wide_resnet10_1_mod"])
def test_mod_changes_activations_and_shortcuts_alone(name: str) -> None:
    net, plain = (NETWORKS[each](10, 1).eval() for each in (name, name.removesuffix("_mod")))
    assert not any(isinstance(module, nn.ReLU) for module in net.modules())
    assert {module.negative_slope for module in net.modules() if isinstance(module, nn.LeakyReLU)} == {0.01}
    lost = set(plain.state_dict()) - set(net.state_dict())
    assert set(net.state_dict()) < set(plain.state_dict())
    assert lost and all(".downsample." in entry or ".shortcut." in entry for entry in lost)
    trial = torch.zeros(1, 1, 28, 28)
    layer = list_layers(net, trial)[-3].name
    assert truncate(net, [layer], keep_output=True, trial=trial).is_traced
    bound_spectral_norm(net, 3.0, trial)
    assert fold_spectral_norm(net)(torch.zeros(2, 1, 28, 28)).shape == (2, 10)


def dense_norm(layer: nn.Module, input_shape: tuple[int, ...]) -> float:
    """Spectral norm of a layer without bias as one dense matrix."""
    basis = torch.eye(int(torch.Size(input_shape).numel())).view(-1, *input_shape[1:])
    return float(torch.linalg.matrix_norm(layer(basis).flatten(1), 2))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [5, 6])
@torch.no_grad()
def test_bounds_the_convolution_as_a_linear_map(stride: int, size: int) -> None:
    torch.manual_seed(0)
    layer, shape = nn.Conv2d(3, 4, 3, stride, 1, bias=False), (1, 3, size, size)
    free = dense_norm(layer, shape)
    bound = SpectralBound(layer, torch.Size(shape), 0.5 * free)
    bound._iterate(layer.weight, 300)
    assert torch.equal(SpectralBound(layer, torch.Size(shape), 10 * free)(layer.weight), layer.weight)
    layer.weight.copy_(bound(layer.weight))
    assert dense_norm(layer, shape) == pytest.approx(0.5 * free, rel=1e-3)


def test_folding_keeps_the_outputs_of_a_bounded_network() -> None:
    torch.manual_seed(0)
    net = bound_spectral_norm(wide_resnet10_1(10, 3), 0.5, torch.zeros(1, 3, 32, 32)).eval()
    assert sum(isinstance(module, SpectralBound) for module in net.modules()) == 9  # all but the output
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        bounded = net(x)
    fold_spectral_norm(net)
    assert set(net.state_dict()) == set(wide_resnet10_1(10, 3).state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(net(x), bounded)


def test_bounded_network_trains_under_autocast() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3, 2, 1), nn.Flatten(), nn.Linear(36, 2)
    )
    bound_spectral_norm(net, 0.1, torch.zeros(1, 1, 6, 6)).train()
    with torch.autocast("cpu", torch.bfloat16):
        net(torch.randn(8, 1, 6, 6)).float().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in net.parameters())
