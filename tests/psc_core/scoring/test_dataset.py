"""A model over a data set gives what it serves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import PSC, open_dataset
from psc_core.errors import UsageError
from psc_core.scoring import dataset_outputs
from tools.forge import ALLOW


def test_outputs_are_those_of_predict(tiny_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    data = open_dataset(f"mnist:{data_root}", split="test", preprocess=psc.preprocess).subset(torch.arange(70))
    expected = psc.compute(next(iter(data.batches(70))).images)
    torch.testing.assert_close(dataset_outputs(psc, data, "test").packed, expected.packed, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="read through the model's preprocessing"):
        dataset_outputs(psc, replace(data, preprocess=replace(psc.preprocess, mean=(0.0,))), "test")
