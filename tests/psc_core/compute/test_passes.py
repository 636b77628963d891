from __future__ import annotations

import numpy as np
import torch

from psc_core.compute.passes import Compute, passes
from psc_core.data.dataset import labelled
from psc_core.data.sources import ArraySource
from psc_core.images.preprocess import Preprocess

PREPROCESS = Preprocess("L", 2, 2, None, (0.5,), (0.25,))
CPU = Compute(torch.device("cpu"), batch_images=4)


def test_passes_standardised_images_in_order() -> None:
    pixels = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    data = labelled("numbers", ["a", "b"], ArraySource(pixels), torch.arange(10) % 2, PREPROCESS)
    order = torch.arange(9, -1, -1)
    values, batches = zip(*passes(data, CPU, "test", lambda images: images, order=order), strict=True)
    assert [len(batch.images) for batch in batches] == [4, 4, 2]
    expected = (torch.from_numpy(pixels[::-1].copy())[:, None].double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(torch.cat(values).double(), expected, rtol=0, atol=1e-6)
    assert all(value.is_inference() for value in values)
    assert torch.cat([batch.labels for batch in batches]).tolist() == (order % 2).tolist()


def test_bf16_runs_under_autocast() -> None:
    data = labelled("zero", ["a"], ArraySource(np.zeros((1, 2, 2), np.uint8)), torch.zeros(1), PREPROCESS)
    layer = torch.nn.Conv2d(1, 1, 1)
    ((value, _),) = passes(data, Compute(torch.device("cpu"), "bf16"), "test", layer)
    assert value.dtype == torch.bfloat16
