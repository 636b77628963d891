"""What a fit asks of a classifier: the network's own accuracy, and what is said of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, FitSettings, open_dataset
from psc_core.data.dataset import ArraySource, ImageDataset, labelled
from psc_core.tasks.classification import Classification, network_accuracy
from tests.conftest import TinyJob

COMPUTE = FitSettings(device="cpu").compute()


@pytest.fixture(scope="module")
def train(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])


def test_network_accuracy_counts_the_fraction_of_labels_that_is_predicted(train: ImageDataset) -> None:
    data = replace(train, labels=train.labels.repeat_interleave(2), offsets=2 * train.offsets)
    k = len(data.classes)
    data.labels[::6] = (data.labels[::6] + 1) % k
    images = torch.cat([batch.images for batch in data.batches(256)])
    lookup = {image.numpy().tobytes(): i for i, image in enumerate(images)}
    answers = torch.randint(0, k, (len(data),), generator=torch.Generator().manual_seed(0))
    answers[: len(data) // 2] = data.labels[::2][: len(data) // 2]

    class Remembers(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            pixels = ((x - shift) / scale).round().to(torch.uint8)
            return torch.nn.functional.one_hot(answers[[lookup[each.numpy().tobytes()] for each in pixels]], k).float()

    scale, shift = data.preprocess.scale_and_shift()
    pairs = data.labels.view(-1, 2)
    expected = float((pairs == answers[:, None]).double().mean())
    assert network_accuracy(Remembers(), data, COMPUTE)[0] == pytest.approx(expected)


def test_warns_of_validation_images_that_are_prepared_otherwise(
    tiny_job: TinyJob, train: ImageDataset, data_root: Path
) -> None:
    val = open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])
    turned = torch.cat([batch.images for batch in val.batches(256)])[:, 0].flip(1).numpy()
    others = labelled("turned", val.classes, ArraySource(turned), val.labels, val.preprocess)
    said = Classification.first_evaluation(tiny_job.net, train, others, COMPUTE)
    assert "much harder" in said.warning
