"""The ``-mod`` architecture of Deep Deterministic Uncertainty (Mukhoti et al., 2023).

Two changes to a residual network keep it sensitive to its input: LeakyReLU (slope 0.01) for ReLU, so that no unit is
flat, and, where a block changes stride or width, a shortcut without weights, which averages s × s pixels (s the stride)
and pads the new channels with zeros, for a strided 1×1 convolution.  At an odd size, which s does not divide, every
s-th pixel is taken instead, as in the authors' code.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def average_shortcut(x: Tensor, stride: int, added: int) -> Tensor:
    """(B, C, H, W) to (B, C + added, ⌈H/s⌉, ⌈W/s⌉)."""
    size = stride if x.shape[2] % 2 == 0 else 1
    return F.pad(F.avg_pool2d(x, size, stride), (0, 0, 0, 0, 0, added))


torch.fx.wrap("average_shortcut")  # One call of a traced graph, because it asks for the size.


class AverageShortcut(nn.Module):
    """:func:`average_shortcut` in place of a 1×1 convolution."""

    def __init__(self, convolution: nn.Conv2d) -> None:
        super().__init__()
        self.stride = convolution.stride[0]
        self.added = convolution.out_channels - convolution.in_channels

    def forward(self, x: Tensor) -> Tensor:
        return average_shortcut(x, self.stride, self.added)


def modify(net: nn.Module) -> nn.Module:
    """Make both changes in ``net``, a ResNet of torchvision or a Wide-ResNet, in place."""
    for parent in list(net.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.ReLU):
                setattr(parent, name, nn.LeakyReLU(inplace=child.inplace))
            elif name == "downsample" and isinstance(child, nn.Sequential) and isinstance(child[0], nn.Conv2d):
                setattr(parent, name, AverageShortcut(child[0]))
            elif name == "shortcut" and isinstance(child, nn.Conv2d):
                setattr(parent, name, AverageShortcut(child))
    return net
