"""A network small enough to train while tests run, as a factory that ``psc-fit`` can name."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:  # A service that builds the network loads no data sets.
    from psc_core.data.dataset import ImageDataset


def network(num_classes: int = 10, in_channels: int = 1) -> nn.Module:
    """Three convolutions and a linear layer for 28-pixel images."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, num_classes),
    )


class LeNet(nn.Module):
    """Two convolutions and two linear layers for 28-pixel images, flattened by ``view`` as in many tutorials."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 6, 5, stride=2)
        self.conv2 = nn.Conv2d(6, 8, 5)
        self.fc1 = nn.Linear(8 * 4 * 4, 24)
        self.fc2 = nn.Linear(24, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        x = functional.relu(self.conv1(x))
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = x.view(x.size(0), -1)
        logits: Tensor = self.fc2(functional.relu(self.fc1(x)))
        return logits


class Tokens(nn.Module):
    """Blocks with attention over a few tokens, the first of which is classified; tokens or images come first."""

    def __init__(self, num_classes: int = 10, in_channels: int = 1, tokens: int = 4, *, first: bool = True) -> None:
        super().__init__()
        self.tokens, self.first = tokens, first
        self.patch = nn.Linear(784 * in_channels // tokens, 8)
        self.blocks = nn.Sequential(*(Attends(first=first) for _ in range(3)))
        self.head = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (batch, classes)."""
        x = self.patch(x.flatten(1).unflatten(1, (self.tokens, -1)))
        x = self.blocks(x.transpose(0, 1))[0] if self.first else self.blocks(x)[:, 0]
        logits: Tensor = self.head(x)
        return logits


class Attends(nn.Module):
    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, batch_first=not first)
        self.linear, self.out = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        read = self.norm(x)
        x = x + self.attention(read, read, read, need_weights=False)[0]
        y: Tensor = x + self.out(functional.relu(self.linear(x)))
        return y


def train(
    dataset: ImageDataset, epochs: int = 6, seed: int = 0, factory: Callable[[int, int], nn.Module] = network
) -> nn.Module:
    """Train the network of ``factory`` on ``dataset`` in a second or two."""
    torch.manual_seed(seed)
    net = factory(len(dataset.classes), dataset.preprocess.channels)
    batches = [(dataset.preprocess.standardise(b.images), b.labels, b.image_index) for b in dataset.batches(64)]
    optimizer = torch.optim.Adam(net.parameters(), 3e-3)
    for _ in range(epochs):
        for images, labels, image_index in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images)[image_index], labels).backward()
            optimizer.step()
    return net.eval()


def train_values(dataset: ImageDataset, epochs: int = 20, seed: int = 0) -> nn.Module:
    """Train :func:`network` with one output to predict the numbers of ``dataset``."""
    assert dataset.values is not None
    torch.manual_seed(seed)
    net = network(1, dataset.preprocess.channels)
    scale = float(dataset.values.std())
    batches = [(dataset.preprocess.standardise(b.images), b.values) for b in dataset.batches(64)]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(epochs):
        for images, values in batches:
            optimizer.zero_grad()
            assert values is not None
            nn.functional.mse_loss(net(images)[:, 0], values.float() / scale).backward()
            optimizer.step()
    with torch.no_grad():
        for parameter in net[-1].parameters():
            parameter.mul_(scale)
    return net.eval()
