"""A small convolutional network for an angle, and its training."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.train import is_trained, learning_rate, load_images, save_trained
from psc_core.compute import track
from psc_core.data.dataset import ImageDataset

BATCH = 128
PEAK = 3e-3  # The peak learning rate of Adam's single cycle.


class AngleNet(nn.Module):
    """Build three convolutions and two linear layers for 28-pixel images."""

    def __init__(self, num_classes: int = 1, in_channels: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, stride=2, padding=1)
        self.hidden = nn.Linear(64 * 49, 128)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv3(F.relu(self.conv2(F.relu(self.conv1(x))))))
        outputs: Tensor = self.output(self.dropout(F.relu(self.hidden(x.flatten(1)))))
        return outputs


def gaussian_nll(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean NLL of standardised numbers under outputs (mean, log variance)."""
    log_variance = outputs[:, 1].clamp(-10, 10)
    return 0.5 * ((y - outputs[:, 0]).square() * (-log_variance).exp() + log_variance).mean()


def trained(
    data: ImageDataset, file: Path, *, epochs: int, seed: int, outputs: int = 1, dropout: float = 0.0
) -> AngleNet:
    """Load the network in ``file``, which is trained first if missing; outputs are in the target's unit."""
    net = AngleNet(outputs, data.preprocess.channels, dropout)
    if is_trained(file, data):
        net.load_state_dict(load_file(file))
        return net.eval()
    assert data.values is not None
    torch.manual_seed(seed)
    net = AngleNet(outputs, data.preprocess.channels, dropout).train()
    scale, center = data.values.std(), data.values.mean()
    images, y = load_images(data), ((data.values - center) / scale).float()
    optimizer = torch.optim.Adam(net.parameters(), PEAK)
    generator = torch.Generator().manual_seed(seed)
    per_epoch = -(-len(data) // BATCH)
    for epoch in range(epochs):
        order = torch.randperm(len(data), generator=generator)
        parts = track(order.split(BATCH), total=per_epoch, description=f"{file.stem} {epoch + 1}/{epochs}")
        for step, chosen in enumerate(parts, epoch * per_epoch):
            optimizer.param_groups[0]["lr"] = learning_rate("one-cycle", PEAK, step, epochs * per_epoch)
            got = net(data.preprocess.standardise(images[chosen]))
            loss = F.mse_loss(got[:, 0], y[chosen]) if outputs == 1 else gaussian_nll(got, y[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():  # From deviation 1 to the target's unit.
        net.output.weight[0] *= scale
        net.output.bias[0] = net.output.bias[0] * scale + center
        if outputs == 2:
            net.output.bias[1] += 2 * scale.log()
    save_trained(net, file, {"train_digest": data.digest()})
    return net.eval()


def network(num_classes: int = 1, in_channels: int = 1) -> nn.Module:
    return AngleNet(num_classes, in_channels)
