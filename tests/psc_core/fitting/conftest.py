"""A trained network, its images and a projection."""

import pytest
import torch

from psc_core import FitSettings, fit_projection, load_network, measure_collapse
from psc_core.data.dataset import ImageDataset
from psc_core.projection import FittedProjection
from tests.conftest import TinyJob
from tests.opened import opened

FACTORY = "tests.tiny:network"
SETTINGS = FitSettings(device="cpu")


@pytest.fixture(scope="session")
def net(tiny_job: TinyJob) -> torch.nn.Module:
    weights = tiny_job.weights
    return load_network(FACTORY, weights=weights, num_classes=10)


@pytest.fixture(scope="session")
def train() -> ImageDataset:
    return opened("mnist", "train")


@pytest.fixture(scope="session")
def val() -> ImageDataset:
    return opened("mnist", "val")


@pytest.fixture(scope="session")
def projection(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> FittedProjection:
    chosen = measure_collapse(net, train, val, settings=SETTINGS).choose("4")
    return fit_projection(net, chosen, train, val, settings=SETTINGS)
