"""A network small enough to train while tests run, as a factory that ``psc-fit`` can name."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

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


def train(dataset: ImageDataset, epochs: int = 6, seed: int = 0) -> nn.Module:
    """Train :func:`network` on ``dataset`` in a second or two."""
    torch.manual_seed(seed)
    net = network(len(dataset.classes), dataset.preprocess.channels)
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
