"""The paper's networks in their small-image form (3×3 stride-1 stem, no max-pool), as plain factories.

``psc-fit --model benchmarks.networks:wide_resnet28_10`` uses any of them; the ResNets and the VGG are
torchvision's own with a small stem, so a bundle of theirs loads without this module.

Spectral normalisation follows Deep Deterministic Uncertainty (Mukhoti et al., 2023): a *bound*, not an
equality.  A weight W with spectral norm σ > coefficient is served as W · coefficient / σ, with one power
iteration a training step; a convolution's σ is that of its (out, in · kernel) matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchvision import models


def _small_resnet(build: Callable[..., nn.Module], num_classes: int, in_channels: int) -> nn.Module:
    net = build(weights=None, num_classes=num_classes)
    net.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet-18 for 28- and 32-pixel images."""
    return _small_resnet(models.resnet18, num_classes, in_channels)


def resnet50(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """ResNet-50 for 28- and 32-pixel images."""
    return _small_resnet(models.resnet50, num_classes, in_channels)


def vgg16(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """VGG-16 with batch normalisation and one linear layer behind a global average pool."""
    net = models.vgg16_bn(weights=None, num_classes=num_classes)
    net.features[0] = nn.Conv2d(in_channels, 64, kernel_size=3, padding=1)
    # 28 pixels survive four of the five halvings: 28 → 14 → 7 → 3 → 1.
    net.features[43] = nn.Identity()
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Linear(512, num_classes)
    return net


class _WideBlock(nn.Module):
    """Pre-activation block of a Wide-ResNet: (BN, ReLU, 3×3) twice beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        same = channels == width and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(F.relu(self.bn1(x)))
        return self.conv2(F.relu(self.bn2(out))) + self.shortcut(x)


class WideResNet(nn.Module):
    """Wide-ResNet-``depth``-``widen`` (Zagoruyko & Komodakis, 2016) for small images."""

    def __init__(self, depth: int, widen: int, num_classes: int, in_channels: int) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        widths = (16 * widen, 32 * widen, 64 * widen)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        channels, stages = 16, []
        for stage, width in enumerate(widths):
            layers = []
            for block in range(blocks):
                layers.append(_WideBlock(channels, width, 2 if stage > 0 and block == 0 else 1))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn1 = nn.BatchNorm2d(channels)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(F.relu(self.bn1(out))), 1))


def wide_resnet28_10(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Wide-ResNet-28-10, the paper's CIFAR-10 network."""
    return WideResNet(28, 10, num_classes, in_channels)


def wide_resnet16_2(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Wide-ResNet-16-2: the same family at a size that trains on a CPU in minutes."""
    return WideResNet(16, 2, num_classes, in_channels)


NETWORKS: Mapping[str, Callable[[int, int], nn.Module]] = {
    "resnet18": resnet18,
    "resnet50": resnet50,
    "vgg16": vgg16,
    "wide_resnet28_10": wide_resnet28_10,
    "wide_resnet16_2": wide_resnet16_2,
}


class SpectralBound(nn.Module):
    """Parametrisation W ↦ W · min(1, coefficient / σ(W)), σ by power iteration."""

    u: Tensor
    v: Tensor

    def __init__(self, weight: Tensor, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        matrix = weight.detach().flatten(1)
        self.register_buffer("u", F.normalize(torch.randn(matrix.shape[0]), dim=0))
        self.register_buffer("v", F.normalize(torch.randn(matrix.shape[1]), dim=0))
        self._iterate(matrix, 15)

    @torch.no_grad()
    def _iterate(self, matrix: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.v.copy_(F.normalize(matrix.T @ self.u, dim=0))
            self.u.copy_(F.normalize(matrix @ self.v, dim=0))

    def forward(self, weight: Tensor) -> Tensor:
        matrix = weight.flatten(1)
        if self.training:
            self._iterate(matrix.detach(), 1)
        sigma = torch.dot(self.u.clone(), matrix @ self.v.clone())
        return weight / torch.clamp(sigma / self.coefficient, min=1.0)


def bound_spectral_norm(net: nn.Module, coefficient: float) -> nn.Module:
    """Put a :class:`SpectralBound` on every convolution and hidden linear layer of ``net``, in place."""
    hidden = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)][:-1]
    for module in hidden:
        parametrize.register_parametrization(module, "weight", SpectralBound(module.weight, coefficient))
    return net


def fold_spectral_norm(net: nn.Module) -> nn.Module:
    """Replace every bound weight by its bounded value, in place: an ordinary network remains."""
    net.eval()
    for module in net.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return net
