"""Make bundles for servers from images of the repository: networks that cost next to nothing, and a large one."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.serving.images import DATA
from psc_core.cli.fit import main as psc_fit
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS
from psc_core.network.load import load_network

FACTORY, UNTRACEABLE = "benchmarks.serving.bundles:network", "benchmarks.serving.bundles:untraceable"
DIGITS, PHOTOGRAPHS = (f"mnist:{DATA}", "mnist"), (f"cifar10:{DATA}", "imagenet")
"""The data and their preprocessing; CIFAR-10 is enlarged to 224 pixels."""


def network(num_classes: int = 10, in_channels: int = 1, stride: int = 4) -> nn.Module:
    """Build two convolutions of four channels and a linear layer: 28 → 7 → 4 pixels, or 224 with a stride of 32."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 4, stride=stride),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


class _Looks(nn.Module):
    """A network that looks at its input, so that it cannot be traced and waits for the device."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise ValueError("expected finite images")
        logits: Tensor = self.body(x)
        return logits


def untraceable(num_classes: int = 10) -> nn.Module:
    """Build :func:`network` for digits in a form that only hooks can cut."""
    return _Looks(network(num_classes))


def small(folder: Path, *, photographs: bool = False) -> Path:
    """Train and fit :func:`network` on digits or photographs, and return ``folder``."""
    data, preset = PHOTOGRAPHS if photographs else DIGITS
    images = open_dataset(data, split="train", preprocess=PRESETS[preset])
    arguments = {"in_channels": images.preprocess.channels, "stride": 32 if photographs else 4}
    torch.manual_seed(0)
    net = network(len(images.classes), **arguments)
    batches = [(images.preprocess.standardise(batch.images), batch.labels) for batch in images.batches(64)]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(20):
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    words = ["--layer=2", "--c-proj=2", "--d-proj=4"]
    words += [word for name, value in arguments.items() for word in ("--model-arg", f"{name}={value}")]
    return _fitted(folder, FACTORY, net, data, preset, *words)


def hooked(folder: Path) -> Path:
    """Fit :func:`untraceable` with random weights on digits."""
    torch.manual_seed(0)
    return _fitted(folder, UNTRACEABLE, untraceable(), *DIGITS, "--layer=body.2", "--max-images=300")


def untrained(folder: Path, spec: str, device: str) -> Path:
    """Fit a ResNet of torchvision with random weights and ten classes on photographs."""
    torch.manual_seed(0)
    net = load_network(spec, num_classes=10)
    return _fitted(folder, spec, net, *PHOTOGRAPHS, "--layer=layer4.0.downsample.0", f"--device={device}")


def _fitted(folder: Path, spec: str, net: nn.Module, data: str, preset: str, *words: str) -> Path:
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        weights = Path(scratch) / "net.safetensors"
        save_file(net.state_dict(), weights)
        given = ["--model", spec, "--weights", str(weights), "--train", data, "--val", data, "--preset", preset]
        if psc_fit([*given, "--device=cpu", "--no-report", *words, "--out", str(folder)]) != 0:
            raise RuntimeError(f"psc-fit failed on {spec}; see above")
    return folder
