"""The trainer learns, resumes where it was, and follows its schedules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks import checkpoints, runs, train
from benchmarks.networks import NETWORKS
from benchmarks.paper import common
from tests import tiny


@pytest.fixture
def tiny_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, checkpoints):
        monkeypatch.setattr(module, "NETWORKS", {**NETWORKS, "resnet18": tiny.network})


def arguments(data_root: Path, out: Path, *extra: str) -> list[str]:
    return [
        "--network",
        "resnet18",
        "--data",
        f"mnist:{data_root}",
        "--preset",
        "mnist",
        "--epochs",
        "3",
        "--lr",
        "0.05",
        "--precision",
        "fp32",
        "--device",
        "cpu",
        "--out",
        str(out),
        *extra,
    ]


@pytest.mark.usefixtures("tiny_network")
def test_learns_and_writes_a_summary(data_root: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.safetensors"
    args = arguments(data_root, out, "--epochs", "8", "--batch", "16", "--weight-decay", "0")
    summary = train.train(train.parser().parse_args(args))
    assert float(summary["test_accuracy"]) > 0.7  # type: ignore[arg-type]
    assert json.loads(out.with_suffix(".json").read_text()) == summary
    assert set(load_file(out)) == set(tiny.network().state_dict())


@pytest.mark.usefixtures("tiny_network")
def test_interrupted_run_gives_the_same_weights(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, broken = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    train.train(train.parser().parse_args(arguments(data_root, straight, "--augment")))
    real = train.track

    def stop_in_the_second_epoch(*items: object, description: str, **options: object) -> Iterator[object]:
        if description.startswith("epoch 2"):
            raise KeyboardInterrupt
        return real(*items, description=description, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "track", stop_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        train.train(train.parser().parse_args(arguments(data_root, broken, "--augment")))
    monkeypatch.setattr(train, "track", real)
    train.train(train.parser().parse_args(arguments(data_root, broken, "--augment")))
    first, second = load_file(straight), load_file(broken)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)


def test_schedules() -> None:
    ddu = [train.learning_rate("ddu", 0.1, epoch, 350) for epoch in (0, 149, 151, 249, 251, 349)]
    assert ddu == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    cycle = [train.learning_rate("one-cycle", 0.1, step, 100) for step in range(100)]
    assert max(cycle) == pytest.approx(0.1, rel=0.05)
    assert cycle[0] < 0.01
    assert cycle[-1] < 0.01


@pytest.mark.usefixtures("tiny_network")
def test_full_scale_trains_as_the_paper_does(data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[dict[str, object]] = []

    class Sgd(torch.optim.SGD):
        def __init__(self, params: list[dict[str, object]], **options: float) -> None:
            groups.extend(params)
            super().__init__(params, **options)

    monkeypatch.setattr(torch.optim, "SGD", Sgd)
    script = runs.parser("a script")
    words = ["--scale", "full", "--data", str(data_root), "--checkpoints", str(tmp_path)]
    run = runs.start("script", script.parse_args(words))
    job = common.job(run, "resnet18", "mnist")
    assert (job.epochs, job.schedule, job.batch) == (350, "ddu", 128)
    checkpoints.obtain(run, replace(job, epochs=1))
    summary = json.loads((tmp_path / "resnet18-mnist-e1-b128-ddu-s0.json").read_text())
    assert summary["schedule"] == "ddu"
    assert [group for group in groups if group["params"] and group["weight_decay"] != 5e-4] == []


def test_augmentation_shifts_and_flips() -> None:
    images = torch.arange(1, 33, dtype=torch.uint8).view(1, 1, 1, 32).expand(64, 3, 32, 32)
    moved = train.augment(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape
    assert moved.dtype == torch.uint8
    centre = moved[:, 0, 16, 8:24].int()
    steps = centre[:, 1:] - centre[:, :-1]
    assert set(steps.unique().tolist()) == {-1, 1}
