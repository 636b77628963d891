from __future__ import annotations

import inspect
import io
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from psc_core import compute as distributed
from psc_core import fit as stages
from psc_core.compute import (
    Compute,
    add_statistics,
    distances_to_means,
    join_processes,
    own_state,
    passes,
    resolve_device,
    track,
)
from psc_core.data.dataset import ArraySource, balanced, labelled
from psc_core.errors import UsageError
from psc_core.fit_data import FitData, FitJob
from psc_core.images.preprocess import Preprocess
from psc_core.linalg import ClassScatter, nc1_of, scatter_sums
from psc_core.settings import FitSettings
from tests.psc_core.test_collapse import Net, images, measured, on_cpu
from tests.reference import collapse as reference


def test_auto_is_cuda_if_available() -> None:
    assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")


def test_resolves_names_and_devices() -> None:
    assert resolve_device("cpu") == resolve_device(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["gpu", "cpu:x", "meta", "cuda:99"])
def test_rejects_unknown_devices(name: str) -> None:
    with pytest.raises(UsageError, match="device"):
        resolve_device(name)


def test_rejects_what_names_no_device() -> None:
    with pytest.raises(UsageError, match="expected a device auto, cpu, cuda or cuda:N, got None"):
        inspect.unwrap(resolve_device)(None)  # type: ignore[arg-type]  # Without the type checks of the tests.


@contextmanager
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


AMBIENT: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "float64": float64_default,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "device": lambda: torch.device("meta"),
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
}


def state() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_default_device(),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
    )


@pytest.mark.parametrize("ambient", AMBIENT)
def test_what_a_program_has_set_is_left_outside(ambient: str) -> None:
    own = state()
    with AMBIENT[ambient]():
        before = state()
        assert before != own
        with own_state(), own_state():
            assert state() == own
        assert state() == before
        with pytest.raises(ValueError, match="inside"), own_state():
            raise ValueError("inside")
        assert state() == before
    assert state() == own


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


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_gets_one_line_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("abc", total=3, description="pass 1")) == ["a", "b", "c"]
    assert re.fullmatch(r"pass 1 3/3 \([\d.]+/s, 0 s\)\n", capsys.readouterr().err)


def test_long_pass_logs_every_thirty_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count(0.0, 10.0)
    monkeypatch.setattr("psc_core.compute.time.monotonic", lambda: next(clock))
    list(track(range(7), total=7, description="pass"))
    assert capsys.readouterr().err.splitlines() == [
        "pass 3/7 (0.1/s, 30 s, 40 s left)",
        "pass 6/7 (0.1/s, 60 s, 10 s left)",
        "pass 7/7 (0.1/s, 80 s)",
    ]


def test_empty_pass_logs_zero(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track([], total=0, description="pass")) == []
    assert capsys.readouterr().err == "pass 0/0 (0.0/s, 0 s)\n"


def test_search_that_ends_early_is_done(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(track("ab", total=7, description="search")) == ["a", "b"]
    assert re.fullmatch(r"search 2/2 \([\d.]+/s, 0 s\)\n", capsys.readouterr().err)


def test_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    assert list(track(range(3), total=3, description="pass")) == [0, 1, 2]
    assert "\rpass: 100%" in terminal.getvalue() and "3/3" in terminal.getvalue()


def test_ranges_add_up_to_a_nearest_mean_classifier() -> None:
    compute = FitSettings(device="cpu", batch_images=16).compute()
    train, val = images(0, 40), images(1, 21)
    ranges = (slice(0, 7), slice(7, 36))

    def step(inputs: Tensor) -> list[Tensor]:
        return [inputs.flatten(1)]

    def of(features: list[Tensor]) -> list[Tensor]:
        return [features[0][:, columns] for columns in ranges]

    statistics = [ClassScatter(3, columns.stop - columns.start) for columns in ranges]
    add_statistics(statistics, train, compute, "", step, of)
    nc1 = nc1_of(torch.stack([*map(scatter_sums, statistics)]).sum(0))
    means = [scatter.means for scatter in statistics]
    nearest = torch.cat(
        [sum(found).argmin(1) for _, _, found in distances_to_means(means, val, compute, "", step, of)]  # type: ignore[union-attr, arg-type]
    )
    x, x_val = (
        np.stack([data.image(i).astype(float).flatten() / 255 for i in range(len(data))]) for data in (train, val)
    )
    labels, val_labels = train.labels.tolist(), val.labels.tolist()
    assert abs(nc1 - reference.nc1(x, labels, 3)) < 1e-6
    assert float((nearest == val.labels).double().mean()) == reference.nc4(x, labels, x_val, val_labels, 3)


PROGRAM = """
import json, torch
from psc_core.compute import join_processes
from tests.psc_core.test_collapse import measured
from tests.psc_core.test_collapse import Net, images, on_cpu
processes = join_processes()
compute = on_cpu().compute(processes)
labels = torch.randint(0, 3, (41, 2), generator=torch.Generator().manual_seed(0))
reports = [
    measured(Net(), images(0, 41, labels), images(1, 21), on_cpu(8, max_memory=budget), processes)
    for budget in (1 << 30, 900)
]
total = compute.sum_(torch.tensor([float(compute.rank + 1)]))
answer = {"total": total.item(), "world": compute.world, "reports": [report.to_json() for report in reports]}
print(json.dumps(answer))
"""


def process(rank: int, world: int) -> Compute:
    return on_cpu().compute((rank, world))


def run_two() -> list[dict[str, Any]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    root = Path(__file__).resolve().parents[2]
    shared = {
        **os.environ,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "PYTHONPATH": str(root),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**shared, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    answers = []
    for process in processes:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err.decode()
        answers.append(json.loads(out.splitlines()[-1]))
    return answers


def test_two_processes_equal_one() -> None:
    """In one group of layers and in column ranges."""
    labels = torch.randint(0, 3, (41, 2), generator=torch.Generator().manual_seed(0))
    alone = measured(Net(), images(0, 41, labels), images(1, 21), on_cpu(8))
    first, second = run_two()
    assert first["world"] == 2 and first["total"] == second["total"] == 3.0
    assert first["reports"] == second["reports"]
    for report in first["reports"]:
        for layer, found in zip(alone.layers, report["layers"], strict=True):
            assert found["name"] == layer.name
            assert found["nc1"] == pytest.approx(layer.nc1, rel=1e-8) and found["quality"] == layer.quality


def test_shards_partition_labelled_examples() -> None:
    data = images(0, 11, torch.randint(0, 3, (11, 2)))
    shards = [process(rank, 3) for rank in range(3)]
    assert sum(len(compute.shard(data)) for compute in shards) == 11
    examples = torch.cat([compute.shard_examples(data) for compute in shards])
    assert sorted(examples.tolist()) == list(range(22))
    for compute in shards:
        assert torch.equal(compute.shard(data).labels, data.labels[compute.shard_examples(data)])


def test_shard_may_be_empty() -> None:
    assert len(process(2, 3).shard(images(0, 40).subset(torch.arange(2)))) == 0


def test_rejects_fewer_images_than_processes() -> None:
    few = balanced(images(0, 40), 2 * len(images(0, 40).classes))
    process(1, len(few)).require(few)
    world = len(few) + 1
    for rank in range(world):
        with pytest.raises(UsageError, match=f"for each of {world} processes, got {len(few)}"):
            stages.collapse(Net(), FitJob(FitData.of(few, few), on_cpu(), process(rank, world)))


def test_single_process_neither_shards_nor_sums() -> None:
    data = images(0, 5)
    alone = process(0, 1)
    assert alone.shard(data) is data
    assert torch.equal(alone.shard_examples(data), torch.arange(5))
    assert alone.sum_(torch.ones(1)).item() == 1.0


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
