"""A trained network, its images and a projection."""

from pathlib import Path

import pytest
import torch

from psc_core import FitSettings, fit_projection, load_network, measure_collapse, open_dataset
from psc_core.data.dataset import ImageDataset
from psc_core.images.preprocess import PRESETS
from psc_core.projection import FittedProjection
from tests.conftest import TinyJob

FACTORY = "tests.tiny:network"
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="session")
def net(tiny_job: TinyJob) -> torch.nn.Module:
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    return load_network(FACTORY, weights=weights, num_classes=10)


@pytest.fixture(scope="session")
def train(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])


@pytest.fixture(scope="session")
def val(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])


@pytest.fixture(scope="session")
def projection(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> FittedProjection:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    return fit_projection(net, chosen, train, val, settings=SETTINGS)
