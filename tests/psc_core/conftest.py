"""A fitted model and images."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psc_core import PRESETS, PSC, open_dataset

ALLOW = ("tests.tiny:network",)


@pytest.fixture(scope="session")
def psc(tiny_bundle: Path) -> PSC:
    return PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


@pytest.fixture(scope="session")
def digits(data_root: Path) -> torch.Tensor:
    test = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    return next(iter(test.batches(100))).images
