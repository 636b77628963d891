"""Steps: eager ones, those of a GPU with a CUDA that only takes notes, and what all share."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.compiler.config
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from app.inference import steps
from app.inference.batcher import RequestMode
from app.inference.steps import EagerStep, GraphStep, TorchThreads, buckets_to, is_out_of_memory, make_step
from app.main import allow_compiled_shapes
from tests.app.fakes import FakePipeline, outputs_of, pixels
from tests.app.inference.support import stack


class CountsThreads(FakePipeline):
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
    def __call__(self, images: torch.Tensor, /) -> torch.Tensor:
        time.sleep(0.001 * len(images))
        return super().__call__(images)


@pytest.mark.usefixtures("device_thread")
def test_a_step_beside_another_has_images_of_its_own_and_half_of_the_threads() -> None:
    network, usual, shape, cpu = CountsThreads(), torch.get_num_threads(), (1, 8, 8), torch.device("cpu")
    step = make_step(network, shape, max_batch=2, device=cpu, threads=TorchThreads(4, 1))
    assert isinstance(step, EagerStep)
    assert make_step(network, shape, max_batch=2, device=cpu, threads=TorchThreads(1, 1)).beside() is None
    network.has_hooks = True  # Its passes take turns, which needs all threads for each.
    assert step.beside() is None
    network.has_hooks = False
    other = step.beside()
    assert other is not None
    for each, value in ((step, 3), (other, 7)):
        each.input(0)[:1] = value
    try:
        other.is_alone = False
        answers = [each.fetch(0, 1) for each in (step, other)]
    finally:
        torch.set_num_threads(usual)
    assert network.threads[-2:] == [4, 2]
    for answer, value in zip(answers, (3, 7), strict=True):
        expected = outputs_of(torch.from_numpy(stack(pixels(value))))
        np.testing.assert_allclose(answer, expected.numpy(), atol=1e-6)


def test_step_with_a_slow_full_batch_is_not_quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.inference.steps.QUICK_SECONDS", 0.008)
    step = make_step(TimeAnImage(), (1, 8, 8), max_batch=8, device=torch.device("cpu"), compiled=False)
    assert not step.warm_up()


def test_every_bucket_is_warmed_up() -> None:
    assert buckets_to(1) == (1,)
    assert buckets_to(6) == (1, 2, 4, 6)
    assert buckets_to(8) == (1, 2, 4, 8)
    network = FakePipeline()
    step = EagerStep(network, (1, 8, 8), max_batch=6, device=torch.device("cpu"), fixed_shapes=True)
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
    step = EagerStep(network, (1, 8, 8), max_batch=8, device=torch.device("cpu"), fixed_shapes=True)  # type: ignore[arg-type]
    assert not step.warm_up(lambda: len(network.sizes) < 2)
    assert network.sizes == [1, 2]


SHAPE = (1, 2, 2)


class Network:
    """Sum and maximum of each image; remembers its last call, which is what a capture records."""

    is_traced = True

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, images: Tensor, /) -> Tensor:
        self.sizes.append(len(images))
        flat = images.flatten(1).float()
        packed = torch.stack([flat.sum(1), flat.amax(1)], 1)
        self.last = (images, packed)
        return packed

    def explain(self, images: Tensor, /, *, with_map: bool) -> tuple[Tensor, dict[str, Tensor]]:
        return self(images), {"first": images[:, 0, 0, 0], **({"map": images[:, 0]} if with_map else {})}

    def forward_with_map(self, images: Tensor, /) -> tuple[Tensor, Tensor]:
        return self(images), images[:, 0]


class Cuda:
    """Stands in for ``torch.cuda``: what was captured, and whether anyone has waited."""

    def __init__(self, network: Network) -> None:
        self.captured: list[int] = []
        self.has_waited = False
        self.network = network

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Stream:
            def __init__(self, *_: Any) -> None:
                pass

            def synchronize(self) -> None:
                cuda.has_waited = True

        class Event:
            def record(self, _: Any) -> None:
                pass

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                cuda.has_waited = True

        class Graph:
            images = packed = torch.empty(0)

            def replay(self) -> None:
                self.packed.copy_(cuda.network(self.images))

        @contextmanager
        def capture(graph: Graph, **options: Any) -> Iterator[None]:
            assert options["capture_error_mode"] == "thread_local"
            yield
            assert cuda.network.last is not None
            graph.images, graph.packed = cuda.network.last
            cuda.captured.append(len(graph.images))

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            yield

        patch.setattr(steps, "_IDLE_STREAMS", defaultdict(list))
        for name, value in {
            "Stream": Stream,
            "Event": Event,
            "CUDAGraph": Graph,
            "graph": capture,
            "stream": on,
            "graph_pool_handle": object,
            "set_device": lambda _: None,
        }.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Tensor, "pin_memory", lambda self: self)


@pytest.fixture
def network() -> Network:
    return Network()


@pytest.fixture
def cuda(network: Network, monkeypatch: pytest.MonkeyPatch) -> Cuda:
    fake = Cuda(network)
    fake.install(monkeypatch)
    return fake


@pytest.fixture
def step(network: Network, cuda: Cuda) -> GraphStep:
    ready = GraphStep(network, SHAPE, max_batch=6, device=torch.device("cpu"))
    ready.warm_up()
    cuda.has_waited = False
    return ready


def fill(step: GraphStep, slot: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    images = np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    step.input(slot)[:count] = images
    flat = images.reshape(count, -1).astype(np.float32)
    return np.stack([flat.sum(1), flat.max(1)], 1)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 6])
def test_a_replay_of_the_bucket_gives_the_outputs(step: GraphStep, cuda: Cuda, count: int) -> None:
    expected = fill(step, 0, count, count)
    step.launch(0, count)
    assert not cuda.has_waited
    np.testing.assert_array_equal(step.fetch(0, count), expected)
    assert cuda.has_waited


@pytest.mark.usefixtures("step")
def test_every_bucket_is_captured_once_and_the_largest_first(cuda: Cuda) -> None:
    assert cuda.captured == [6, 4, 2, 1]


def test_two_slots_are_in_flight_at_once(step: GraphStep, cuda: Cuda) -> None:
    first = fill(step, 0, 4, 1)
    step.launch(0, 4)
    second = fill(step, 1, 2, 2)
    step.launch(1, 2)
    assert not cuda.has_waited
    assert step.done(0)
    packed = step.fetch(0, 4)
    fill(step, 0, 4, 3)
    step.launch(0, 4)  # while the second is still to be fetched
    np.testing.assert_array_equal(step.fetch(1, 2), second)
    np.testing.assert_array_equal(packed, first)  # the caller's own: later steps do not write into it


def test_outputs_of_the_padding_never_come_out(step: GraphStep) -> None:
    fill(step, 0, 6, 1)
    step.launch(0, 6)
    step.fetch(0, 6)
    expected = fill(step, 0, 3, 2)
    step.launch(0, 3)
    np.testing.assert_array_equal(step.fetch(0, 3), expected)


def test_an_explanation_leaves_what_is_in_flight_alone(step: GraphStep) -> None:
    expected = fill(step, 0, 4, 1)
    step.launch(0, 4)
    images = np.full((3, *SHAPE), 7, np.uint8)
    result = step.explain(images, RequestMode.EXPLAIN_WITH_MAP)
    assert result.packed.tolist() == [[28.0, 7.0]] * 3
    assert result.explanation["first"].tolist() == [7, 7, 7] and "map" in result.explanation
    assert step.explain(images, RequestMode.MAP).explanation.keys() == {"map"}
    np.testing.assert_array_equal(step.fetch(0, 4), expected)


def test_a_cuda_device_gets_graphs(network: Network, cuda: Cuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **more: torch.empty(*args, **more))
    step = make_step(network, SHAPE, max_batch=6, device=torch.device("cuda"), compiled=False)
    assert isinstance(step, GraphStep)
    assert step.slots == 2
    network.is_traced = False  # Cut by hooks: it may ask the host what to do next, which no graph can.
    assert isinstance(make_step(network, SHAPE, max_batch=6, device=torch.device("cuda"), compiled=False), EagerStep)


class Plain(nn.Module):
    is_traced = True

    def forward(self, images: Tensor, /) -> Tensor:
        return images.flatten(1).float()

    explain = forward_with_map = forward


def test_every_shape_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    for name in ("recompile_limit", "accumulated_recompile_limit"):
        monkeypatch.setattr(torch.compiler.config, name, getattr(torch.compiler.config, name))  # As it was, afterwards.
    allow_compiled_shapes()
    make_step(Plain(), SHAPE, max_batch=1024, device=torch.device("cpu"), compiled=True).warm_up()
    assert compiled.frame_count == 11


def test_a_host_without_room_is_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("another"))
