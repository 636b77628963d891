"""The paper's networks have the published sizes, and spectral normalisation keeps its bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from benchmarks.networks import NETWORKS, bound_spectral_norm, fold_spectral_norm, wide_resnet16_2

PARAMETERS = {"resnet18": 11_173_962, "resnet50": 23_520_842, "wide_resnet28_10": 36_479_194, "vgg16": 14_728_266}


@pytest.mark.parametrize("name", sorted(PARAMETERS))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    with torch.device("meta"):
        net = NETWORKS[name](10, 3)
    assert sum(p.numel() for p in net.parameters()) == PARAMETERS[name]


@pytest.mark.parametrize("name", sorted(NETWORKS))
@pytest.mark.parametrize(("side", "channels"), [(28, 1), (32, 3)])
def test_small_images_give_logits(name: str, side: int, channels: int) -> None:
    if name == "wide_resnet28_10":
        with torch.device("meta"):
            logits = NETWORKS[name](7, channels).eval()(torch.empty(2, channels, side, side))
    else:
        with torch.inference_mode():
            logits = NETWORKS[name](7, channels).eval()(torch.zeros(2, channels, side, side))
    assert logits.shape == (2, 7)


def spectral_norms(net: nn.Module) -> list[float]:
    return [float(torch.linalg.matrix_norm(m.weight.detach().flatten(1), 2))
            for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)]


def test_the_spectral_norm_is_bounded_not_fixed() -> None:
    torch.manual_seed(0)
    net = wide_resnet16_2(10, 3)
    with torch.no_grad():
        net.layer1[0].conv1.weight.mul_(100)
    before = spectral_norms(net)
    fold_spectral_norm(bound_spectral_norm(net, 3.0))
    after = spectral_norms(net)
    assert max(after[:-1]) <= 3.0 * 1.05  # power iteration from a random start
    for old, new in zip(before, after, strict=True):
        if old < 2.9:
            assert new == pytest.approx(old, rel=1e-5)


def test_folding_leaves_an_ordinary_network_with_the_same_outputs() -> None:
    torch.manual_seed(0)
    net = bound_spectral_norm(wide_resnet16_2(10, 3), 0.5).eval()
    x = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        bounded = net(x)
    fold_spectral_norm(net)
    assert set(net.state_dict()) == set(wide_resnet16_2(10, 3).state_dict())
    with torch.inference_mode():
        torch.testing.assert_close(net(x), bounded)
