"""What the step of a GPU does, in order, with a CUDA that only takes notes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from app.inference import steps
from app.inference.batcher import RequestMode
from app.inference.steps import EagerStep, GraphStep, make_step

SHAPE = (1, 2, 2)


BUCKETS = [1, 2, 4, 6]


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
    """Stands in for ``torch.cuda``: ``notes`` says what was asked of the device, in order."""

    def __init__(self, network: Network) -> None:
        self.notes: list[str] = []
        self.captured: list[int] = []
        self.streams: list[Any] = []
        self.network = network
        self.replaying = False

    def install(self, patch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Stream:
            def __init__(self, *_: Any) -> None:
                pass

            def synchronize(self) -> None:
                cuda.notes.append("wait for the stream")

        class Event:
            def record(self, _: Any) -> None:
                cuda.notes.append("record")

            def query(self) -> bool:
                return True

            def synchronize(self) -> None:
                cuda.notes.append("wait for the event")

        class Graph:
            images = packed = torch.empty(0)

            def replay(self) -> None:
                cuda.notes.append(f"replay {len(self.images)}")
                cuda.replaying = True
                self.packed.copy_(cuda.network(self.images))
                cuda.replaying = False

        @contextmanager
        def capture(graph: Graph, **options: Any) -> Iterator[None]:
            assert options["capture_error_mode"] == "thread_local"
            yield
            assert cuda.network.last is not None
            graph.images, graph.packed = cuda.network.last
            cuda.captured.append(len(graph.images))

        @contextmanager
        def on(stream: Stream) -> Iterator[None]:
            cuda.streams.append(stream)
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


class Copies(TorchDispatchMode):
    """Notes copies and fresh tensors outside of replays."""

    def __init__(self, cuda: Cuda, step: GraphStep) -> None:
        super().__init__()
        self.cuda = cuda
        self.step = step

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.cuda.replaying or func.is_view:
            return out
        name = func.overloadpacket.__name__
        if name == "copy_":
            to_device = args[1].data_ptr() in {self.step.input(slot).ctypes.data for slot in range(self.step.slots)}
            name = f"{'to' if to_device else 'from'} device {len(args[0])}"
        self.cuda.notes.append(name)
        return out


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
    cuda.notes.clear()
    return ready


def fill(step: GraphStep, slot: int, count: int, seed: int) -> np.ndarray[Any, Any]:
    images = np.random.default_rng(seed).integers(0, 256, (count, *SHAPE), dtype=np.uint8)
    step.input(slot)[:count] = images
    flat = images.reshape(count, -1).astype(np.float32)
    return np.stack([flat.sum(1), flat.max(1)], 1)


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (5, 6), (6, 6)])
def test_one_copy_in_one_replay_one_copy_out(step: GraphStep, cuda: Cuda, count: int, bucket: int) -> None:
    expected = fill(step, 0, count, count)
    with Copies(cuda, step):
        step.launch(0, count)
        launched = list(cuda.notes)
        packed = step.fetch(0, count)
    assert launched == [f"to device {count}", f"replay {bucket}", f"from device {count}", "record"]
    assert cuda.notes == [*launched, "wait for the event"]  # and nothing allocated on the device
    np.testing.assert_array_equal(packed, expected)


def test_every_bucket_is_captured_once_and_the_largest_first(network: Network, cuda: Cuda, step: GraphStep) -> None:
    assert cuda.captured == BUCKETS[::-1]
    assert network.sizes == [size for size in BUCKETS[::-1] for _ in range(4)]  # three times warm, once captured


def test_two_slots_are_in_flight_at_once(step: GraphStep, cuda: Cuda) -> None:
    first = fill(step, 0, 4, 1)
    step.launch(0, 4)
    second = fill(step, 1, 2, 2)
    step.launch(1, 2)
    assert "wait for the event" not in cuda.notes  # launching never waits
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


def test_streams_of_steps_that_are_gone_are_used_again(network: Network, cuda: Cuda) -> None:
    first, second = (GraphStep(network, SHAPE, max_batch=6, device=torch.device("cpu")) for _ in range(2))
    image = np.zeros((1, *SHAPE), np.uint8)
    first.explain(image, RequestMode.EXPLAIN)
    second.explain(image, RequestMode.EXPLAIN)
    del first
    GraphStep(network, SHAPE, max_batch=6, device=torch.device("cpu")).explain(image, RequestMode.EXPLAIN)
    stream, other, again = cuda.streams
    assert other is not stream
    assert again is stream
