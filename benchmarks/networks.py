"""The paper's networks in their small-image form (3×3 stride-1 stem, no max-pool) and a ViT, as plain factories.

``psc-fit --model benchmarks.networks:NAME`` takes any of them, such as ``wide_resnet28_10``.  The ResNets and the VGG
are torchvision's own with a small stem, so their bundles load without this module.

``…_mod`` is the architecture of Deep Deterministic Uncertainty (Mukhoti et al., 2023).  Two changes keep a residual
network sensitive to its input.  LeakyReLU (slope 0.01) replaces ReLU, so that no unit is flat.  And where a block
changes stride or width, a shortcut without weights replaces the strided 1×1 convolution: it averages s × s pixels (s is
the stride) and pads the new channels with zeros.  At an odd size, which s does not divide, it takes every s-th pixel
instead, as the authors' code does.

Spectral normalisation also follows that paper: a *bound*, not an equality.  A weight W whose spectral norm σ exceeds
the coefficient is replaced by W · coefficient / σ, with one power iteration in each training step.  A convolution's σ
is that of the linear map of images (with stride, padding and input size), which for a 3×3 kernel is up to three times
that of its (out, in · kernel) matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torchvision import models
from torchvision.models.resnet import BasicBlock


def _small_resnet(build: Callable[..., nn.Module], num_classes: int, in_channels: int) -> nn.Module:
    net: nn.Module = build(weights=None, num_classes=num_classes)
    net.conv1 = nn.Conv2d(in_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


def resnet18(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build ResNet-18 for 28- and 32-pixel images."""
    return _small_resnet(models.resnet18, num_classes, in_channels)


def resnet50(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build ResNet-50 for 28- and 32-pixel images."""
    return _small_resnet(models.resnet50, num_classes, in_channels)


class NarrowResNet(nn.Module):
    """Build ResNet-18 for small images with ``width`` channels in its first stage, for few cores."""

    def __init__(self, num_classes: int, in_channels: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu: nn.Module = nn.ReLU()
        self.layer1 = _stage(width, width, 1)
        self.layer2 = _stage(width, 2 * width, 2)
        self.layer3 = _stage(2 * width, 4 * width, 2)
        self.layer4 = _stage(4 * width, 8 * width, 2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        stem = self.relu(self.bn1(self.conv1(x)))
        out = self.layer4(self.layer3(self.layer2(self.layer1(stem))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(out), 1))
        return logits


def _stage(channels: int, width: int, stride: int) -> nn.Sequential:
    """Return two blocks of torchvision's ResNet-18."""
    shortcut = None
    if stride > 1:
        shortcut = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width))
    return nn.Sequential(BasicBlock(channels, width, stride, shortcut), BasicBlock(width, width))


def resnet18_narrow(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build ResNet-18 of a quarter of its width (16 to 128 channels), which a CPU trains in minutes."""
    return NarrowResNet(num_classes, in_channels, 16)


def resnet18_strided(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build :func:`resnet18_narrow` with a stem of stride 2, for wide images."""
    return NarrowResNet(num_classes, in_channels, 16, 2)


def _small_vgg(divisor: int, num_classes: int, in_channels: int) -> nn.Module:
    """Build VGG-16 for small images with a ``divisor``-th of its channels."""
    channels: Any = [each if each == "M" else each // divisor for each in models.vgg.cfgs["D"]]
    features = models.vgg.make_layers(channels, batch_norm=True)
    features[0] = nn.Conv2d(in_channels, channels[0], kernel_size=3, padding=1)
    # 28 pixels survive four of the five halvings: 28 → 14 → 7 → 3 → 1.
    features[43] = nn.Identity()
    net: nn.Module = models.VGG(features, num_classes=num_classes)
    net.avgpool = nn.AdaptiveAvgPool2d(1)
    net.classifier = nn.Linear(512 // divisor, num_classes)
    return net


def vgg16(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build VGG-16 with batch normalisation, and one linear layer after a global average pool."""
    return _small_vgg(1, num_classes, in_channels)


def vgg16_narrow(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build VGG-16 of a quarter of its width (16 to 128 channels), which a CPU trains in minutes."""
    return _small_vgg(4, num_classes, in_channels)


def vit_narrow(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build timm's vision transformer with 6 blocks of 96 features, patches of 4, for images of 28 (grey) or 32."""
    from timm.models.vision_transformer import VisionTransformer

    size = 28 if in_channels == 1 else 32
    net: nn.Module = VisionTransformer(
        size, 4, in_channels, num_classes, embed_dim=96, depth=6, num_heads=3, mlp_ratio=2.0
    )
    return net


BN_MOMENTUM = 0.01  # The momentum of a Wide-ResNet's batch normalisation.


class _WideBlock(nn.Module):
    """A pre-activation block of a Wide-ResNet: (BN, ReLU, 3×3) twice with dropout in between, beside a shortcut."""

    def __init__(self, channels: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels, momentum=BN_MOMENTUM)
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width, momentum=BN_MOMENTUM)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        same = channels == width and stride == 1
        self.shortcut: nn.Module = nn.Identity() if same else nn.Conv2d(channels, width, 1, stride, bias=False)
        self.activation: nn.Module = nn.ReLU()
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out = self.activation(self.bn2(self.conv1(self.activation(self.bn1(x)))))
        sum_: Tensor = self.conv2(self.dropout(out)) + self.shortcut(x)
        return sum_


class WideResNet(nn.Module):
    """Wide-ResNet-``depth``-``widen`` (Zagoruyko & Komodakis, 2016) with DDU's momentum, initialisation and dropout."""

    def __init__(self, depth: int, widen: int, num_classes: int, in_channels: int, dropout: float = 0.0) -> None:
        super().__init__()
        blocks = (depth - 4) // 6
        widths = (16 * widen, 32 * widen, 64 * widen)
        self.conv1 = nn.Conv2d(in_channels, 16, 3, 1, 1, bias=False)
        channels, stages = 16, []
        for stage, width in enumerate(widths):
            layers = []
            for block in range(blocks):
                layers.append(_WideBlock(channels, width, 2 if stage > 0 and block == 0 else 1, dropout))
                channels = width
            stages.append(nn.Sequential(*layers))
        self.layer1, self.layer2, self.layer3 = stages
        self.bn1 = nn.BatchNorm2d(channels, momentum=BN_MOMENTUM)
        self.activation: nn.Module = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        nn.init.zeros_(self.fc.bias)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        logits: Tensor = self.fc(torch.flatten(self.avgpool(self.activation(self.bn1(out))), 1))
        return logits


def wide_resnet28_10(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build Wide-ResNet-28-10 with dropout 0.3, the paper's CIFAR-10 network."""
    return WideResNet(28, 10, num_classes, in_channels, dropout=0.3)


def wide_resnet10_1(num_classes: int = 10, in_channels: int = 3) -> nn.Module:
    """Build Wide-ResNet-10-1, the smallest network of the family, for tests."""
    return WideResNet(10, 1, num_classes, in_channels)


def average_shortcut(x: Tensor, stride: int, added: int) -> Tensor:
    """Average-pool (B, C, H, W) to (B, C + added, ⌈H/s⌉, ⌈W/s⌉), with zeros in the added channels."""
    size = stride if x.shape[2] % 2 == 0 else 1
    return F.pad(F.avg_pool2d(x, size, stride), (0, 0, 0, 0, 0, added))


torch.fx.wrap("average_shortcut")  # One call of a traced graph, because it asks for the size.


class AverageShortcut(nn.Module):
    """A module of :func:`average_shortcut`, in place of a 1×1 convolution."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.stride = convolution.stride[0]
        self.added = convolution.out_channels - convolution.in_channels

    def forward(self, x: Tensor) -> Tensor:
        return average_shortcut(x, self.stride, self.added)


def modify(net: nn.Module) -> nn.Module:
    """Make both changes of DDU in ``net``, a ResNet of torchvision or a Wide-ResNet, in place."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.LeakyReLU(inplace=child.inplace))
            elif name == "downsample" and isinstance(child, nn.Sequential) and isinstance(child[0], nn.Conv2d):
                setattr(parent, name, AverageShortcut(child[0]))
            elif name == "shortcut" and isinstance(child, nn.Conv2d):
                setattr(parent, name, AverageShortcut(child))
    return net


_RESNETS = (resnet18, resnet18_narrow, resnet18_strided, resnet50, wide_resnet28_10, wide_resnet10_1)
_OTHERS = (vgg16, vgg16_narrow, vit_narrow)


def _modified(plain: Callable[[int, int], nn.Module]) -> Callable[[int, int], nn.Module]:
    return lambda num_classes, in_channels: modify(plain(num_classes, in_channels))


NETWORKS: Mapping[str, Callable[[int, int], nn.Module]] = {  # The networks by name; ``…_mod`` as DDU modifies them.
    **{plain.__name__: plain for plain in (*_RESNETS, *_OTHERS)},
    **{f"{plain.__name__}_mod": _modified(plain) for plain in _RESNETS},
}


class SpectralBound(nn.Module):
    """The parametrisation W ↦ W · min(1, coefficient / σ), with σ by power iteration on the layer's own linear map."""

    u: Tensor
    v: Tensor

    def __init__(self, layer: nn.Conv2d | nn.Linear, input_shape: torch.Size, coefficient: float) -> None:
        super().__init__()
        self.coefficient = coefficient
        self.convolution: tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]] | None = None
        weight = layer.weight.detach()
        v = torch.randn(input_shape, device=weight.device)
        if isinstance(layer, nn.Conv2d):
            if isinstance(layer.padding, str) or layer.groups != 1 or layer.dilation != (1, 1):
                raise ValueError(f"expected a plain convolution to bound, got {layer}")
            out = F.conv2d(v, weight, None, layer.stride, layer.padding).shape[2:]
            spare = tuple(
                size - ((o - 1) * s - 2 * p + k)
                for size, o, s, p, k in zip(
                    input_shape[2:], out, layer.stride, layer.padding, layer.kernel_size, strict=True
                )
            )
            self.convolution = (tuple(layer.stride), tuple(layer.padding), spare)
        self.register_buffer("v", F.normalize(v.flatten(), dim=0).view(input_shape))
        self.register_buffer("u", self._map(weight, self.v))
        self._iterate(weight, 15)

    def _map(self, weight: Tensor, v: Tensor) -> Tensor:
        if self.convolution is None:
            return F.linear(v, weight)
        stride, padding, _ = self.convolution
        return F.conv2d(v, weight, None, stride, padding)

    def _adjoint(self, weight: Tensor, u: Tensor) -> Tensor:
        if self.convolution is None:
            return F.linear(u, weight.T)
        stride, padding, spare = self.convolution
        return F.conv_transpose2d(u, weight, None, stride, padding, spare)

    @torch.no_grad()
    def _iterate(self, weight: Tensor, steps: int) -> None:
        for _ in range(steps):
            u = self._map(weight, self.v)
            self.u.copy_(u / u.norm().clamp_min(1e-12))
            v = self._adjoint(weight, self.u)
            self.v.copy_(v / v.norm().clamp_min(1e-12))

    def forward(self, weight: Tensor) -> Tensor:
        # σ in float32 even under autocast: in bfloat16 it would be off by a percent.
        with torch.autocast(weight.device.type, enabled=False):
            if self.training:
                self._iterate(weight.detach(), 1)
            sigma = (self.u.clone() * self._map(weight, self.v.clone())).sum()
        return weight / torch.clamp(sigma / self.coefficient, min=1.0)


def bound_spectral_norm(net: nn.Module, coefficient: float, trial: Tensor) -> nn.Module:
    """Put a :class:`SpectralBound` on every convolution and hidden linear layer of ``net``, in place."""
    hidden = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.Linear)][:-1]
    shapes: dict[nn.Module, torch.Size] = {}

    def remember(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        shapes[module] = args[0].shape

    handles = [module.register_forward_pre_hook(remember) for module in hidden]
    training = net.training
    with torch.no_grad():
        net.eval()(trial)
    net.train(training)
    for handle in handles:
        handle.remove()
    for module in hidden:
        parametrize.register_parametrization(module, "weight", SpectralBound(module, shapes[module], coefficient))
    return net


def fold_spectral_norm(net: nn.Module) -> nn.Module:
    """Replace every bounded parametrisation by its value, in place; plain modules remain."""
    net.eval()
    for module in net.modules():
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
    return net
