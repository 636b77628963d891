"""The network's own output."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from psc_core import PRESETS, open_dataset
from psc_core.compute.passes import Compute
from psc_core.evaluation.own import OwnNetwork


def test_own_probabilities_are_the_softmax(data_root: Path) -> None:
    data = open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 10)).eval()
    own = OwnNetwork.of(net, data, Compute(torch.device("cpu"), batch_images=8))
    assert own is not None
    images = next(data.batches(5)).images
    outputs = own.score(images)
    logits = net((images.double() / 255 - 0.1307).div(0.3081).float()).double()
    expected = logits.exp() / logits.exp().sum(1, keepdim=True)
    assert torch.allclose(outputs.probabilities["base"], expected, atol=1e-5)
    assert torch.allclose(outputs.scores["max-softmax"], 1 - expected.amax(1), atol=1e-5)


def test_a_network_of_other_outputs_has_none(data_root: Path) -> None:
    data = open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    net = nn.Sequential(nn.Flatten(), nn.Linear(784, 7)).eval()
    assert OwnNetwork.of(net, data, Compute(torch.device("cpu"), batch_images=8)) is None
