"""A failed batch is run again in halves: only the image at fault fails its request."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from app.errors import (
    InferenceFailed,
)
from app.inference.engine import Phase
from app.inference.steps import EagerStep
from psc_core.errors import DeviceError
from tests.app.fakes import POISON, outputs_of, pixels
from tests.app.inference.support import engine, stack

pytestmark = pytest.mark.anyio


@pytest.mark.usefixtures("anywhere")
async def test_out_of_memory_splits_the_batch_and_goes_on() -> None:
    async with engine() as setup:
        setup.network.memory = 3
        packed = await setup.arrays(*(pixels(k) for k in range(8)))
        expected = outputs_of(torch.from_numpy(stack(*(pixels(k) for k in range(8))))).numpy()
        np.testing.assert_allclose(packed, expected, atol=1e-6)
        assert max(size for size in setup.network.sizes[1:] if size <= 3) == 2
        assert setup.engine.phase is Phase.READY


@pytest.mark.usefixtures("anywhere")
async def test_memory_is_given_back_before_the_halves_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[int]] = []
    async with engine() as setup:
        setup.network.memory = 2
        monkeypatch.setattr(EagerStep, "release_memory", lambda self: seen.append(list(setup.network.sizes)))
        await setup.arrays(*(pixels(k) for k in range(4)))
        assert seen == [[4]]
        assert setup.network.sizes == [4, 2, 2]


@pytest.mark.usefixtures("anywhere")
async def test_no_memory_even_for_one_image_fails_that_request_only() -> None:
    async with engine() as setup:
        setup.network.memory = 0
        with pytest.raises(DeviceError, match="memory for one image"):
            await setup.arrays(pixels(1))
        setup.network.memory = 8
        assert len(await setup.arrays(pixels(1))) == 1


@pytest.mark.usefixtures("anywhere")
async def test_failing_image_fails_only_its_request() -> None:
    async with engine(delay_ms=50) as setup:
        good = [setup.arrays(pixels(k)) for k in range(5)]
        bad = setup.arrays(pixels(9), pixels(9, first=POISON))
        *packed, error = await asyncio.gather(*good, bad, return_exceptions=True)
        assert isinstance(error, InferenceFailed)
        assert "image 1" in str(error)
        for k, outputs in enumerate(packed):
            expected = outputs_of(torch.from_numpy(stack(pixels(k)))).numpy()
            np.testing.assert_allclose(outputs, expected, atol=1e-6)
        assert setup.engine.phase is Phase.READY
        assert setup.engine.device_error is None
