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

from psc_core.collapse.measure import measure_layers
from psc_core.compute.distributed import Reducer
from psc_core.errors import UsageError
from psc_core.fitting import stages as fit
from tests.psc_core.collapse.test_measure import Net, images, on_cpu

PROGRAM = """
import json, torch
from psc_core.collapse.measure import measure_layers
from psc_core.compute.distributed import Reducer
from tests.psc_core.collapse.test_measure import Net, images, on_cpu
reducer = Reducer.start()
labels = torch.randint(0, 3, (41, 2), generator=torch.Generator().manual_seed(0))
reports = [
    measure_layers(
        Net(), images(0, 41, labels), images(1, 21), on_cpu(8), reducer=reducer, max_memory_bytes=budget
    )
    for budget in (1 << 30, 900)
]
total = reducer.sum_(torch.tensor([float(reducer.rank + 1)]))
answer = {"total": total.item(), "world": reducer.world, "reports": [report.to_json() for report in reports]}
print(json.dumps(answer))
"""


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
    alone = measure_layers(Net(), images(0, 41, labels), images(1, 21), on_cpu(8))
    first, second = run_two()
    assert first["world"] == 2 and first["total"] == second["total"] == 3.0
    assert first["reports"] == second["reports"]
    for report in first["reports"]:
        for layer, measured in zip(alone.layers, report["layers"], strict=True):
            assert measured["name"] == layer.name
            assert measured["nc1"] == pytest.approx(layer.nc1, rel=1e-8) and measured["nc4"] == layer.nc4


def test_shards_partition_labelled_examples() -> None:
    data = images(0, 11, torch.randint(0, 3, (11, 2)))
    shards = [Reducer(rank, 3) for rank in range(3)]
    assert sum(len(reducer.shard(data)) for reducer in shards) == 11
    examples = torch.cat([reducer.shard_examples(data) for reducer in shards])
    assert sorted(examples.tolist()) == list(range(22))
    for reducer in shards:
        assert torch.equal(reducer.shard(data).labels, data.labels[reducer.shard_examples(data)])


def test_shard_may_be_empty() -> None:
    assert len(Reducer(2, 3).shard(images(0, 40).subset(torch.arange(2)))) == 0


def test_rejects_fewer_images_than_processes() -> None:
    few = images(0, 40).subset(torch.arange(2))
    Reducer(1, 2).require(few)
    for rank in range(3):
        with pytest.raises(UsageError, match="for each of 3 processes, got 2"):
            fit.measure_collapse(Net(), few, few, options=fit.FitOptions(device="cpu", reducer=Reducer(rank, 3)))


def test_single_process_neither_shards_nor_sums() -> None:
    data = images(0, 5)
    alone = Reducer()
    assert alone.shard(data) is data
    assert torch.equal(alone.shard_examples(data), torch.arange(5))
    assert alone.sum_(torch.ones(1)).item() == 1.0


def test_start_requires_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(UsageError, match="torchrun"):
        Reducer.start()
