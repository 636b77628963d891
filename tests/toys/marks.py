"""Images with several labels each, drawn: bars and a disc over noise; and a network that is trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional

from psc_core.data.dataset import ArraySource, ImageDataset
from psc_core.images.preprocess import PRESETS, Preprocess
from tests import tiny

MARKS: Final = ("left", "right", "top", "disc")
SIZES: Final = {"train": 600, "val": 400, "test": 200}


def marks(split: str, preprocess: Preprocess) -> ImageDataset:
    """Draw 28-pixel images, each with some of the four marks and at least one."""
    random = np.random.default_rng([*SIZES].index(split))
    count = SIZES[split]
    held = random.random((count, len(MARKS))) < 0.5
    held[np.arange(count), random.integers(0, len(MARKS), count)] = True
    images = random.integers(0, 80, (count, 28, 28)).astype(np.uint8)
    rows, columns = np.mgrid[:28, :28]
    places = columns < 5, columns > 22, rows < 5, np.hypot(rows - 16, columns - 14) < 6
    for mark, place in enumerate(places):
        images[held[:, mark, None, None] & place] += random.integers(90, 170, dtype=np.uint8)
    counts, labels = torch.from_numpy(held.sum(1)), torch.from_numpy(held.nonzero()[1])
    offsets = functional.pad(counts.cumsum(0), (1, 0))
    return ImageDataset(f"marks-{split}", MARKS, ArraySource(images), torch.arange(count), labels, offsets, preprocess)


def trained(folder: Path) -> Path:
    """Train the small network on them, an output for each mark, and return the file of its weights."""
    torch.manual_seed(0)
    data, net = marks("train", PRESETS["mnist"]), tiny.network(len(MARKS))
    held = torch.zeros(len(data), len(MARKS))
    held[torch.arange(len(data)).repeat_interleave(data.offsets.diff()), data.labels] = 1
    images = data.preprocess.standardise(next(data.batches(len(data))).images)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        functional.binary_cross_entropy_with_logits(net(images), held).backward()
        optimizer.step()
    file = folder / "marks.safetensors"
    save_file(nn.Module.state_dict(net), file)
    return file
