"""Not an example: digits as image files, and a short training loop, where you have photographs and a network."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader

from psc_core import PRESETS, open_dataset

DATA = Path(__file__).parents[1] / "tests" / "data"


def scratch() -> Path:
    """An empty folder that is removed when the program ends."""
    folder = Path(tempfile.mkdtemp(prefix="psc-example-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def digit_folders() -> Path:
    """``train/CLASS/``, ``val/CLASS/`` and ``test/CLASS/`` with digits, and ``other/`` with clothes, which are none."""
    images = scratch()
    for folder, spec in (("train", "mnist"), ("val", "mnist"), ("test", "mnist"), ("other", "fashion-mnist")):
        split = "test" if folder == "other" else folder
        data = open_dataset(f"{spec}:{DATA}", split=split, preprocess=PRESETS["mnist"])
        for index, label in enumerate(data.first_labels().tolist()):
            path = images / folder / data.classes[label].replace("/", "-") / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(data.image(index)[0]).save(path)
    return images


def train(
    net: nn.Module,
    data: Any,
    epochs: int = 12,
    loss: Callable[[Tensor, Tensor], Tensor] = nn.functional.cross_entropy,
) -> nn.Module:
    """Train a network on a data set of (input, label); yours is trained already."""
    torch.manual_seed(0)
    batches = list(DataLoader(data, batch_size=64, shuffle=True))
    optimizer = torch.optim.Adam(net.parameters(), 2e-3)
    net.train()
    for _ in range(epochs):
        for inputs, labels in batches:
            optimizer.zero_grad()
            output = net(inputs)
            loss(getattr(output, "logits", output), labels).backward()
            optimizer.step()
    return net.eval()
