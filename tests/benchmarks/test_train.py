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
from benchmarks.train import Job
from tests import tiny

CPU = torch.device("cpu")


@pytest.fixture
def tiny_network(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (train, checkpoints):
        monkeypatch.setattr(module, "NETWORKS", {**NETWORKS, "resnet18": tiny.network})


@pytest.mark.usefixtures("tiny_network")
def test_learns_and_writes_a_summary(data_root: Path, tmp_path: Path) -> None:
    out, job = tmp_path / "net.safetensors", Job("resnet18", "mnist", 8, batch=16)
    summary = train.train(job, f"mnist:{data_root}", out, CPU, lr=0.05, precision="fp32")
    assert float(summary["test_accuracy"]) > 0.7  # type: ignore[arg-type]
    assert json.loads(out.with_suffix(".json").read_text()) == summary
    assert set(load_file(out)) == set(tiny.network().state_dict())


@pytest.mark.usefixtures("tiny_network")
def test_interrupted_run_gives_the_same_weights(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Job, "augment", True)
    straight, broken = tmp_path / "a.safetensors", tmp_path / "b.safetensors"

    def learn(out: Path) -> None:
        train.train(Job("resnet18", "mnist", 3), f"mnist:{data_root}", out, CPU, lr=0.05, precision="fp32")

    learn(straight)
    real = train.track

    def stop_in_the_second_epoch(*items: object, description: str, **options: object) -> Iterator[object]:
        if description.startswith("epoch 2"):
            raise KeyboardInterrupt
        return real(*items, description=description, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "track", stop_in_the_second_epoch)
    with pytest.raises(KeyboardInterrupt):
        learn(broken)
    monkeypatch.setattr(train, "track", real)
    learn(broken)
    first, second = load_file(straight), load_file(broken)
    for name, tensor in first.items():
        torch.testing.assert_close(second[name], tensor)


def test_schedules() -> None:
    ddu = [train.learning_rate("ddu", 0.1, epoch, 350) for epoch in (0, 149, 151, 249, 251, 349)]
    assert ddu == pytest.approx([0.1, 0.1, 0.01, 0.01, 0.001, 0.001])
    cycle = [train.learning_rate("one-cycle", 0.1, step, 100) for step in range(100)]
    assert max(cycle) == pytest.approx(0.1, rel=0.05) and max(cycle[0], cycle[-1]) < 0.01


@pytest.mark.usefixtures("tiny_network")
def test_full_scale_trains_as_the_paper_does(data_root: Path, tmp_path: Path) -> None:
    words = ["--scale", "full", "--data", str(data_root), "--checkpoints", str(tmp_path), "--device", "cpu"]
    run = runs.start("script", runs.parser("a script").parse_args(words))
    job = checkpoints.job_of(run, "resnet18", "mnist")
    assert (job.epochs, job.schedule, job.batch) == (350, "ddu", 128)
    trained = checkpoints.obtain(run, replace(job, epochs=1))
    assert len(trained.fit_on) == len(trained.train)
    summary = json.loads((tmp_path / "resnet18-mnist-e1-b128-ddu-s0.json").read_text())
    assert summary["schedule"] == "ddu"


def test_the_paper_decays_every_parameter() -> None:
    net = tiny.network()
    decayed = {
        schedule: train.optimizer_of(net, schedule, 0.1).param_groups[0]["params"] for schedule in train.SCHEDULES
    }
    assert len(decayed["ddu"]) == len(list(net.parameters())) > len(decayed["one-cycle"])


def test_a_setting_may_train_longer_and_by_another_schedule(data_root: Path, tmp_path: Path) -> None:
    words = ["--scale", "cpu", "--data", str(data_root), "--checkpoints", str(tmp_path), "--device", "cpu"]
    run = runs.start("script", runs.parser("a script").parse_args(words))
    small, job = (checkpoints.job_of(run, *each) for each in (("small", "mnist"), ("vit", "mnist")))
    longer = checkpoints.job_of(run, "vit", "mnist", longer=3, schedule="adamw")
    assert longer == replace(job, epochs=3 * small.epochs, schedule="adamw") and longer.network == "vit_narrow"
    assert checkpoints.job_of(replace(run, epochs=5), "vit", "mnist", longer=3).epochs == 5


def test_adamw_decays_weights_alone() -> None:
    optimizer = train.optimizer_of(tiny.network(), "adamw", 2e-3)
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.05, 0.0]
    assert all(parameter.ndim == 1 for parameter in optimizer.param_groups[1]["params"])


def test_augmentation_shifts_and_flips() -> None:
    images = torch.arange(1, 33, dtype=torch.uint8).view(1, 1, 1, 32).expand(64, 3, 32, 32)
    moved = train.augment(images, torch.Generator().manual_seed(0))
    assert moved.shape == images.shape and moved.dtype == torch.uint8
    assert set(moved[:, 0, 16, 8:24].int().diff().unique().tolist()) == {-1, 1}
    augmented = {
        name: Job("resnet18", name, 1).augment for name in ("mnist", "cifar10", "benchmarks.data:cifar10_few_5000")
    }
    assert list(augmented.values()) == [False, True, False]
