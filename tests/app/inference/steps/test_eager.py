"""The step that runs the network when its outputs are fetched."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from app.inference.steps import EagerStep, TorchThreads, buckets_to, make_step
from tests.app.fakes import FakePipeline, outputs_of, pixels
from tests.app.inference.support import stack


class CountsThreads(FakePipeline):
    """Notes how many threads PyTorch would use in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        self.threads.append(torch.get_num_threads())
        return super().__call__(images)


def test_a_quick_step_takes_one_thread_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = torch.get_num_threads()
    two = TorchThreads(2, 2)
    for limit, given, expected in ((0.0, None, usual), (60.0, None, 1), (60.0, two, 2), (0.0, two, 2)):
        monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", limit)
        network = CountsThreads()
        step = make_step(network, (1, 8, 8), max_batch=2, device=torch.device("cpu"), compiled=False, threads=given)
        try:
            quick = step.warm_up()
            step.fetch(0, 1)
        finally:
            torch.set_num_threads(usual)
        assert network.threads[-1] == expected
        assert quick is (limit > 0)


@pytest.mark.usefixtures("device_thread")
def test_quick_step_leaves_the_threads_of_the_next() -> None:
    usual = torch.get_num_threads()
    network = CountsThreads()
    try:
        torch.set_num_threads(1)  # what a quick step left on the event loop
        threads = TorchThreads(usual + 1, 1)
        step = make_step(network, (1, 8, 8), max_batch=2, device=torch.device("cpu"), threads=threads)
        step.warm_up()
        step.fetch(0, 1)
    finally:
        torch.set_num_threads(usual)
    assert network.threads[-1] == usual + 1


class TimeAnImage(FakePipeline):
    """A millisecond an image."""

    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        time.sleep(0.001 * len(images))
        return super().__call__(images)


def test_step_with_a_slow_full_batch_is_not_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 0.008)
    step = make_step(TimeAnImage(), (1, 8, 8), max_batch=8, device=torch.device("cpu"), compiled=False)
    assert not step.warm_up()


def test_every_bucket_is_warmed_up() -> None:
    assert buckets_to(1) == (1,)
    assert buckets_to(6) == (1, 2, 4, 6)
    assert buckets_to(8) == (1, 2, 4, 8)
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=6, device=torch.device("cpu"))
    step.warm_up()
    assert network.sizes[:4] == [1, 2, 4, 6]  # and then some are timed


def test_fixed_shapes_pad_to_buckets_and_never_answer_the_padding() -> None:
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=8, device=torch.device("cpu"), fixed_shapes=True)
    step.input(0)[:] = 77
    step.input(0)[:3] = stack(pixels(1), pixels(2), pixels(3))
    packed = step.fetch(0, 3)
    assert network.sizes == [4]
    np.testing.assert_allclose(packed, outputs_of(torch.from_numpy(stack(pixels(1), pixels(2), pixels(3)))))


def test_warm_up_ends_when_nobody_waits_any_more() -> None:
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=8, device=torch.device("cpu"))  # type: ignore[arg-type]
    assert not step.warm_up(lambda: len(network.sizes) < 2)
    assert network.sizes == [1, 2]
