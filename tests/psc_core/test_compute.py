import inspect
import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from psc_core import compute as distributed
from psc_core import fit as stages
from psc_core.compute import (
    MAX_CPU_BATCH,
    Compute,
    begin,
    count_images,
    join_processes,
    own_state,
    passes,
    resolve_device,
    side_streams,
    steps,
    together,
    track,
    track_images,
)
from psc_core.data.dataset import ArraySource, draw_balanced, label_images
from psc_core.errors import UsageError
from psc_core.fit_data import FitData, FitJob
from psc_core.images.preprocess import Preprocess
from psc_core.settings import MAX_MEMORY
from tests.psc_core.test_collapse import Net, images, on_cpu


def test_devices_by_name() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "meta", "cuda:99", None])
def test_rejects_unknown_devices(name: str | None) -> None:
    with pytest.raises(UsageError, match="device"):
        inspect.unwrap(resolve_device)(name)  # type: ignore[arg-type]  # Without the type checks of the tests.


@contextmanager
def precision(value: str) -> Iterator[list[Any]]:
    """Set the newer flags of a program, and give those of the operations on a GPU."""
    backends: Any = torch.backends
    operations = [backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul]
    flags = [*operations, backends]
    before = [each.fp32_precision for each in flags]
    older = backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32
    for each in flags:
        each.fp32_precision = value
    try:
        yield operations
    finally:
        backends.cudnn.allow_tf32, backends.cuda.matmul.allow_tf32 = older
        for each, was in zip(flags, before, strict=True):
            each.fp32_precision = was


@pytest.mark.parametrize("before", ["none", "tf32"])
def test_no_tf32_on_a_gpu_whatever_the_program_has_set(before: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with precision(before) as operations:
        assert resolve_device("cuda").type == "cuda"
        assert [operation.fp32_precision for operation in operations] == ["ieee"] * 3
        assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32


def test_batch_size_on_a_cpu() -> None:
    for device, asked, used in (("cpu", 10_000, MAX_CPU_BATCH), ("cpu", 3, 3), ("cuda", 256, 256)):
        assert Compute(torch.device(device), batch_images=asked).batch_size == used


@contextmanager
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_type_that_an_import_sets_inside_does_not_stay() -> None:
    with own_state():
        with own_state():
            torch.set_default_dtype(torch.float64)
        assert torch.get_default_dtype() == torch.float32
        torch.set_default_dtype(torch.float64)
    assert torch.get_default_dtype() == torch.float32


def test_a_thread_that_leaves_does_not_change_the_type_of_others() -> None:
    entered, leave = threading.Event(), threading.Event()

    def other() -> None:
        with own_state():
            entered.set()
            leave.wait(60)

    with float64_default():
        thread = threading.Thread(target=other)
        thread.start()
        assert entered.wait(60)
        with own_state():
            pass
        assert torch.get_default_dtype() == torch.float32
        leave.set()
        thread.join(60)
        assert torch.get_default_dtype() == torch.float64


PREPROCESS = Preprocess("L", 2, 2, None, (0.5,), (0.25,))
CPU = Compute(torch.device("cpu"), batch_images=4)


def test_passes_standardised_images_in_order() -> None:
    pixels = np.arange(40, dtype=np.uint8).reshape(10, 2, 2)
    data = label_images("numbers", ["a", "b"], ArraySource(pixels), torch.arange(10) % 2, PREPROCESS)
    order = torch.arange(9, -1, -1)
    values, batches = zip(*passes(data, CPU, "test", lambda images: images, order=order), strict=True)
    assert [len(batch.images) for batch in batches] == [4, 4, 2]
    expected = (torch.from_numpy(pixels[::-1].copy())[:, None].double() / 255 - 0.5) / 0.25
    torch.testing.assert_close(torch.cat(values).double(), expected, rtol=0, atol=1e-6)
    assert all(value.is_inference() for value in values)
    assert torch.cat([batch.labels for batch in batches]).tolist() == (order % 2).tolist()


def test_bf16_runs_under_autocast() -> None:
    data = label_images("zero", ["a"], ArraySource(np.zeros((1, 2, 2), np.uint8)), torch.zeros(1), PREPROCESS)
    layer = torch.nn.Conv2d(1, 1, 1)
    ((value, _),) = passes(data, Compute(torch.device("cpu"), "bf16"), "test", layer)
    assert value.dtype == torch.bfloat16


def test_long_pass_logs_each_half_minute(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("psc_core.compute.time.monotonic", lambda: next(clock))
    list(track(range(7), total=7, description="pass"))
    assert capsys.readouterr().err.splitlines() == [
        "pass 3/7 (0.1/s, 30 s, 40 s left)",
        "pass 6/7 (0.1/s, 60 s, 10 s left)",
        "pass 7/7 (0.1/s, 80 s)",
    ]


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_pass_counts_images(
    is_terminal: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = images(0, 11)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    assert sum(len(batch.images) for batch in track_images(data, process(0, 1), "pass")) == len(data)
    assert f"{0 if is_terminal else len(data)}/{len(data)} " in capsys.readouterr().err


def test_steps_number_what_is_tracked(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 50.0)
    monkeypatch.setattr("psc_core.compute.time.monotonic", lambda: next(clock))
    with steps(["layers", "report"]) as progress:
        list(track([0], total=1, description="before"))
        begin("elsewhere")
        begin("report")
        list(track([0], total=1, description="pass"))
        count_images(150)
    list(track([0], total=1, description="after"))
    said = [line.split(" (")[0] for line in capsys.readouterr().err.splitlines()]
    assert said == ["before 1/1", "step 2 of 2: pass 1/1", "after 1/1"]
    assert "; the network ran 1.5 times over the training images" in progress.text(100)
    assert progress.text(100).startswith("took ") and " min " in progress.text(100)


def process(rank: int, world: int) -> Compute:
    return on_cpu().compute((rank, world))


def test_shards_partition_labelled_examples() -> None:
    data = images(0, 11, torch.randint(0, 3, (11, 2)))
    shards = [process(rank, 3) for rank in range(3)]
    assert sum(len(compute.shard(data)) for compute in shards) == 11
    examples = torch.cat([compute.shard_examples(data) for compute in shards])
    assert sorted(examples.tolist()) == list(range(22))
    for compute in shards:
        assert torch.equal(compute.shard(data).labels, data.labels[compute.shard_examples(data)])
    assert len(shards[2].shard(data.subset(torch.arange(2)))) == 0
    alone = process(0, 1)
    assert alone.shard(data) is data and torch.equal(alone.shard_examples(data), torch.arange(22))
    assert alone.sum_(torch.ones(1)).item() == 1.0


def test_rejects_fewer_images_than_processes() -> None:
    few = draw_balanced(images(0, 40), 2 * len(images(0, 40).classes))
    process(1, len(few)).require(few)
    world = len(few) + 1
    for rank in range(world):
        with pytest.raises(UsageError, match=f"for each of {world} processes, got {len(few)}"):
            stages.collapse(Net(), FitJob(FitData.of(few, few), on_cpu(), process(rank, world)))


def test_start_requires_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        join_processes()


@pytest.mark.parametrize(
    ("gpus", "backend", "used"),
    [(0, None, []), (1, "gloo", [0, 0, 0]), (2, "gloo", [0, 1, 0]), (3, None, [0, 1, 2]), (4, None, [0, 1, 2])],
)
def test_processes_share_gpus(gpus: int, backend: str | None, used: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three processes: NCCL, which is the default's for CUDA tensors, only where each has a GPU of its own."""
    chosen: list[int] = []
    backends: list[str | None] = []
    group = distributed.dist
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(group, "init_process_group", backends.append)
    monkeypatch.setattr(group, "get_world_size", lambda: 3)
    monkeypatch.setattr(distributed.atexit, "register", lambda leave: leave)
    for rank in range(3):
        for name, value in {"RANK": rank, "WORLD_SIZE": 3, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 3}.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(group, "get_rank", lambda rank=rank: rank)
        assert join_processes() == (rank, 3)
    assert (chosen, backends) == (used, [backend] * 3)


def test_memory_of_what_changes_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 90 << 30))
    assert Compute(torch.device("cpu")).device_memory == MAX_MEMORY
    assert Compute(torch.device("cuda")).device_memory == 20 << 30
    assert Compute(torch.device("cuda"), max_memory=40 << 30).device_memory == 40 << 30
    assert Compute(torch.device("cuda"), max_memory=1 << 20).device_memory == 1 << 20  # Asked for, so kept.
    assert Compute(torch.device("cuda"), world=2).device_memory == MAX_MEMORY


class Stream:
    """A CUDA stream that is not there, and notes which other it waits for."""

    def __init__(self, name: str, waits: list[tuple[str, str]]) -> None:
        self.name, self._waits = name, waits

    def wait_stream(self, other: "Stream") -> None:
        self._waits.append((self.name, other.name))


def test_calls_on_streams_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[tuple[str, str]] = []
    here, *sides = (Stream(name, waits) for name in ("here", "first", "second"))
    running = [here]

    @contextmanager
    def switch(stream: Stream) -> Iterator[None]:
        running.append(stream)
        yield
        running.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", switch)
    calls = [lambda: running[-1].name for _ in range(3)]
    assert together(*calls) == ("here", "here", "here") and waits == []
    with side_streams(sides):
        assert together(*calls) == ("here", "first", "second")
    assert waits == [("first", "here"), ("second", "here"), ("here", "first"), ("here", "second")]
    with side_streams(sides[:1]):  # Too few.
        assert together(*calls) == ("here", "here", "here")
