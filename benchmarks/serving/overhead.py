"""Bundles whose network costs next to nothing, so that only the server's overhead is measured."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.runs import ROOT
from psc_core.cli.fit import main as psc_fit
from psc_core.data.spec import open_dataset
from psc_core.images.preprocess import PRESETS

FACTORY = "benchmarks.serving.overhead:network"
DATA = ROOT / "tests" / "data"


def network(num_classes: int = 10, in_channels: int = 1, stride: int = 4) -> nn.Module:
    """Two convolutions of four channels and a linear layer: 28 → 7 → 4 pixels, or 224 with a stride of 32."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 4, 4, stride=stride),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, num_classes),
    )


def make_bundle(folder: Path, *, photographs: bool = False) -> Path:
    """Train the network on digits or small photographs of the repository and fit it; returns ``folder``.

    Args:
        folder: To write.
        photographs: Classify RGB images of 224 × 224 instead of digits.

    Raises:
        RuntimeError: ``psc-fit`` failed.
    """
    data, preset, arguments = f"mnist:{DATA}", "mnist", {"in_channels": 1, "stride": 4}
    if photographs:
        data, preset, arguments = f"cifar10:{DATA}", "imagenet", {"in_channels": 3, "stride": 32}
    images = open_dataset(data, split="train", preprocess=PRESETS[preset])
    torch.manual_seed(0)
    net = network(len(images.classes), **arguments)
    batches = [(images.preprocess.standardise(batch.images), batch.labels) for batch in images.batches(64)]
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(20):
        for inputs, labels in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
    with tempfile.TemporaryDirectory(prefix="psc-benchmark-") as scratch:
        weights = Path(scratch) / "net.safetensors"
        save_file(net.state_dict(), weights)
        options = f"--model {FACTORY} --preset {preset} --device cpu --layer 2 --c-proj 2 --d-proj 4".split()
        options += [word for name, value in arguments.items() for word in ("--model-arg", f"{name}={value}")]
        data_options = ["--train", data, "--val", data, "--weights", str(weights), "--out", str(folder)]
        if psc_fit([*options, *data_options]) != 0:
            raise RuntimeError("psc-fit failed on the overhead-bound network; see above")
    return folder
