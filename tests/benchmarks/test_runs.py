"""What is found in a folder is taken again for the same data, settings and seed alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import checkpoints, fitting, reviewed, train
from benchmarks.ood import pretrained
from benchmarks.ood.settings import SETTINGS
from benchmarks.regression import run as regression
from benchmarks.regression.networks import AngleNet, trained
from benchmarks.runs import RESULTS, Json, Run
from psc_core import PRESETS, open_dataset
from psc_core.errors import DataError


@pytest.fixture
def run(data_root: Path, tmp_path: Path) -> Run:
    return Run("any", "smoke", data_root, tmp_path, tmp_path / "checkpoints", 0, torch.device("cpu"), "", epochs=1)


@pytest.fixture
def other(run: Run, tmp_path: Path) -> Run:
    """The same run on data with other training digits."""
    data = tmp_path / "data"
    shutil.copytree(run.data, data)
    for kind, number in (("images", 3), ("labels", 1)):
        of_train, of_test = (
            data / "MNIST" / "raw" / f"{split}-{kind}-idx{number}-ubyte.gz" for split in ("train", "t10k")
        )
        of_train.write_bytes(of_test.read_bytes())
    return replace(run, data=data)


def test_a_part_is_measured_again_on_other_data(run: Run, other: Run) -> None:
    measured: list[Path] = []

    def measure(on: Run) -> Json:
        return on.part("a", {}, lambda: measured.append(on.data) or {"data": str(on.data)})

    for each in (run, run, other, other):
        assert measure(each) == {"data": str(each.data)}
    assert measured == [run.data, other.data]


def test_a_network_of_other_images_is_refused(run: Run, other: Run) -> None:
    job = checkpoints.job_of(run, "small", "mnist")
    weights = run.checkpoints / f"{job.name}.safetensors"
    first = checkpoints.obtain(run, job)
    written = weights.stat().st_mtime_ns
    assert torch.equal(next(checkpoints.obtain(run, job).net.parameters()), next(first.net.parameters()))
    assert weights.stat().st_mtime_ns == written
    with pytest.raises(DataError, match="--checkpoints"):
        checkpoints.obtain(other, job)
    weights.with_suffix(".json").unlink()
    with pytest.raises(DataError, match="--checkpoints"):
        checkpoints.obtain(run, job)


def test_training_does_not_go_on_with_other_images(run: Run, other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job = checkpoints.job_of(run, "small", "mnist")
    out = run.checkpoints / f"{job.name}.safetensors"

    def stop(*_: object) -> None:
        raise InterruptedError

    with monkeypatch.context() as patched:
        patched.setattr(train, "correct", stop)  # At the end of all epochs.
        with pytest.raises(InterruptedError):
            checkpoints.obtain(run, job)
    with pytest.raises(DataError, match="partial"):
        train.train(job, other.spec(job.data), out, run.device)
    train.train(job, run.spec(job.data), out, run.device)
    assert out.exists()


def test_stages_are_measured_again_on_other_data(run: Run, other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    job, measured = checkpoints.job_of(run, "small", "mnist"), []
    measure = fitting.fit.measure_collapse
    monkeypatch.setattr(fitting.fit, "measure_collapse", lambda *a, **k: measured.append(1) or measure(*a, **k))
    for each, times in ((run, 1), (run, 1), (other, 2)):
        if each is other:
            (run.checkpoints / f"{job.name}.safetensors").unlink()
        each = replace(each, fit_images=100)
        fitting.measure(each, checkpoints.obtain(each, job))
        assert len(measured) == times


def test_a_pretrained_network_of_other_images_is_refused(run: Run, other: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("efficientnet_lite_pytorch", reason="its networks come with psc[bench]")
    job = pretrained.PretrainedJob(2, 5, epochs=0, data="mnist", known=(0, 1))
    monkeypatch.setattr(pretrained, "train", lambda job, *_: job.backbone.build(job.count))
    pretrained.obtain(run, job)
    pretrained.obtain(run, job)
    with pytest.raises(DataError, match="--checkpoints"):
        pretrained.obtain(other, job)


def test_a_network_for_angles_of_other_images_is_refused(run: Run) -> None:
    digits = open_dataset(run.spec("rotated-mnist"), split="val", preprocess=PRESETS["mnist"])
    file, (first, second) = run.checkpoints / "angle.safetensors", torch.arange(40).split(20)
    for _ in range(2):
        trained(digits.subset(first), file, epochs=1, seed=0)
    with pytest.raises(DataError, match="--checkpoints"):
        trained(digits.subset(second), file, epochs=1, seed=0)


def keys(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that each part's settings are added to, in place of a measurement."""
    found: list[Any] = []
    monkeypatch.setattr(Run, "part", lambda _run, _name, settings, _compute: found.append(dict(settings)))
    return found


def test_reviewed_images_are_measured_again_on_another_network(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    setting, found = SETTINGS["mnist-held-out-0"], keys(monkeypatch)
    reviewed.one_setting(run, setting)
    reviewed.one_setting(run, replace(setting, network="vit"))
    for name, value in {"SAMPLES": (4,), "ALPHA": 0.1, "WRONG": 0.2}.items():
        monkeypatch.setattr(reviewed, name, value)
        reviewed.one_setting(run, setting)
    assert len({str(each) for each in found}) == 5


def test_angles_are_measured_again_by_other_methods(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--scale", "smoke", "--data", str(run.data), "--out", str(run.out)]
    found = keys(monkeypatch)
    monkeypatch.setattr(Run, "write", lambda *_: {})
    monkeypatch.setenv("PSC_DATA", "")
    changes = {"MEMBERS": 2, "DROPOUT": 0.5, "PASSES": 3, "COVERAGE": 0.8, "EPOCHS": {"smoke": 9}, "MODELS": {}}
    regression.main(words)
    for name, value in changes.items():
        monkeypatch.setattr(regression, name, value)
        regression.main(words)
    assert len({str(each) for each in found}) == 1 + len(changes)


def test_two_seeds_of_angles_share_no_network(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    trainings: list[tuple[Path, int, int]] = []

    def record(_data: object, file: Path, *, epochs: int, seed: int, outputs: int, dropout: float) -> AngleNet:
        trainings.append((file, seed, outputs))
        return AngleNet(outputs)

    def fit(_run: Run, weights: Path, *_: object, **__: object) -> None:
        fitted.append(weights)
        raise InterruptedError

    fitted: list[Path] = []
    monkeypatch.setattr(regression, "trained", record)
    monkeypatch.setattr(regression, "mc_dropout", lambda *_: None)
    monkeypatch.setattr(regression, "fit", fit)
    for seed in (0, 1, 2):
        with pytest.raises(InterruptedError):
            regression.compare(replace(run, seed=seed, fit_images=100), 1)
    files, members = [file for file, _, _ in trainings], [seed for _, seed, outputs in trainings if outputs == 2]
    assert len({*files}) == len(files) == 3 * (2 + regression.MEMBERS)
    assert len({*members}) == len(members) == 3 * regression.MEMBERS
    assert len({*fitted}) == 3


def test_rows_of_reviewed_images_say_their_draws() -> None:
    record = json.loads((RESULTS / "reviewed-cpu.json").read_text())
    row = next(line for line in reviewed.table(record).splitlines() if line.startswith("| 100 | 12 | one class |"))
    assert "0.717 → 0.869" in row
