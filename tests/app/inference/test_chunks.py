"""A batch in parts: the same outputs in the same order, and nothing still running when the call ends."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.inference.steps.chunks import MIN_CHUNK_IMAGES, ParallelChunks
from psc_core.model.predictor import PSC


def sums(images: Tensor) -> Tensor:
    return images.flatten(1).float().sum(1, keepdim=True)


class Calls:
    """Which images came in which call, on which thread, with how many threads of PyTorch."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def __call__(self, images: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        self.seen.append((len(images), threading.get_ident(), torch.get_num_threads()))
        return sums(images)


@pytest.fixture(autouse=True)
def threads_as_before() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@given(count=st.integers(1, 200), threads=st.integers(1, 5), concurrent=st.booleans())
def test_outputs_are_those_of_the_whole_batch(count: int, threads: int, concurrent: bool) -> None:
    images = torch.arange(count * 2).reshape(count, 1, 1, 2)
    calls = Calls()
    assert torch.equal(ParallelChunks(calls, threads, concurrent=concurrent)(images), sums(images))
    sizes = [size for size, _, _ in calls.seen]
    assert sum(sizes) == count
    assert len(sizes) == (max(1, min(threads, count // MIN_CHUNK_IMAGES)) if concurrent else 1)
    assert all(size >= MIN_CHUNK_IMAGES for size in sizes) or len(sizes) == 1
    assert sum(used for _, _, used in calls.seen) <= max(threads, 1)
    assert calls.seen[0][2] == threads // len(sizes)


def test_parts_run_at_the_same_time_and_the_first_on_the_calling_thread() -> None:
    meet = threading.Barrier(2, timeout=30)
    calls = Calls()

    def network(images: Tensor) -> Tensor:
        meet.wait()  # breaks unless both parts are running
        return calls(images)

    ParallelChunks(network, 2, concurrent=True)(torch.zeros(2 * MIN_CHUNK_IMAGES, 1, 1, 1))
    workers = {thread for _, thread, _ in calls.seen}
    assert len(workers) == 2
    assert threading.get_ident() in workers


def test_the_number_of_threads_can_be_changed() -> None:
    calls = Calls()
    chunks = ParallelChunks(calls, 2, concurrent=True)
    chunks.threads = 1
    chunks(torch.zeros(10 * MIN_CHUNK_IMAGES, 1, 1, 1))
    assert [(size, used) for size, _, used in calls.seen] == [(10 * MIN_CHUNK_IMAGES, 1)]


@pytest.mark.parametrize("failing", [0, 1], ids=["the caller's part", "another part"])
def test_an_error_waits_for_the_other_part(failing: int) -> None:
    ended = []

    def network(images: Tensor) -> Tensor:
        if int(images[0, 0, 0, 0]) == failing * MIN_CHUNK_IMAGES:
            raise RuntimeError("no memory")
        time.sleep(0.2)
        ended.append(True)
        return sums(images)

    images = torch.arange(2 * MIN_CHUNK_IMAGES).reshape(-1, 1, 1, 1)
    with pytest.raises(RuntimeError, match="no memory"):
        ParallelChunks(network, 2, concurrent=True)(images)
    assert ended == [True]


def test_shipped_network_on_several_threads(shipped_bundle: Path) -> None:
    pipeline = PSC.load(shipped_bundle, device="cpu").pipeline
    assert pipeline.concurrent
    images = torch.randint(0, 256, (4 * MIN_CHUNK_IMAGES, 1, 28, 28), dtype=torch.uint8)
    with torch.inference_mode():
        one_by_one = torch.cat([pipeline(part) for part in images.tensor_split(4)])
    chunks = ParallelChunks(pipeline, 4, concurrent=True)
    for _ in range(5):
        torch.testing.assert_close(chunks(images), one_by_one, rtol=1e-4, atol=1e-5)
    pipeline.scorer.backbone.method = "hooks"
    assert not pipeline.concurrent
