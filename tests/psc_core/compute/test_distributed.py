from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import compute as distributed
from psc_core import fit as stages
from psc_core.compute import Compute, join_processes
from psc_core.data.dataset import balanced
from psc_core.errors import UsageError
from psc_core.fit_data import FitData, FitJob
from tests.psc_core.collapse.support import measured
from tests.psc_core.collapse.test_measure import Net, images, on_cpu

PROGRAM = """
import json, torch
from psc_core.compute import join_processes
from tests.psc_core.collapse.support import measured
from tests.psc_core.collapse.test_measure import Net, images, on_cpu
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
    root = Path(__file__).resolve().parents[3]
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
            assert found["nc1"] == pytest.approx(layer.nc1, rel=1e-8) and found["nc4"] == layer.quality


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
