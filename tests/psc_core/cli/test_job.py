import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core import FitSettings, open_dataset
from psc_core.cli import fit as cli
from psc_core.cli import job as estimate
from psc_core.cli.job import job_of, provenance_of, without_path
from psc_core.compute import Compute
from psc_core.data.cache import Scratch
from psc_core.data.open import image_folder
from psc_core.fit_data import FitData, FitJob
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network.described import NetworkSpec
from psc_core.network.weights import digest_of
from tests.conftest import Run, TinyJob
from tests.opened import opened


@pytest.mark.parametrize("flags", [[], ["--max-images", "200"], ["--dry-run"]])
def test_rejects_training_images_as_validation(
    tiny_job: TinyJob, data_root: Path, tmp_path: Path, run: Run, flags: list[str]
) -> None:
    same = f"mnist:{data_root}#train"
    args = [*tiny_job.args, "--train", same, "--val", same, "--out", str(tmp_path / "b"), *flags]
    printed, err = run(cli.main, *args, code=2)
    assert "hold some images out" in err and "layer" not in printed


def write_bitmaps(root: Path, shade: int) -> Path:
    """Files of one size, whatever they show."""
    for name in "ab":
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((28, 28), shade + i, np.uint8)).save(root / name / f"{i}.bmp")
    return root


def provenance(data: FitData, folder: Path) -> dict[str, Any]:
    weights = folder / "weights"
    weights.write_bytes(b"")
    return provenance_of(NetworkSpec("torchvision:resnet18", 2, weights=(weights,)), FitSettings(), data)


def test_undecodable_folder_name(tmp_path: Path) -> None:
    data = image_folder(write_bitmaps(tmp_path / os.fsdecode(b"caf\xe9"), 0), PRESETS["mnist"])
    assert provenance(FitData.of(data, data), tmp_path)["train"]["name"] == "caf\\xe9"


def test_no_path_of_this_machine(tmp_path: Path) -> None:
    (tmp_path / "my-vit").mkdir()
    assert without_path(f"hf:{tmp_path}/my-vit/") == without_path(f"hf:{tmp_path}/my-vit/../my-vit") == "hf:my-vit"
    for spec in ("hf:acme/net", "timm:resnet18", "torchvision:resnet18", "package.module:factory"):
        assert without_path(spec) == spec


def test_digest_of_weights_in_parts(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("1", "2", "whole")]
    for file, content in zip(files, (b"ab", b"c", b"abc"), strict=True):
        file.write_bytes(content)
    assert digest_of(files[:2]) == digest_of(files[2:]) == hashlib.sha256(b"abc").hexdigest()


@pytest.mark.parametrize("cache", [None, Scratch()])
def test_edited_images_of_the_same_size_are_another_job(tmp_path: Path, cache: Scratch | None) -> None:
    roots = [write_bitmaps(tmp_path / str(n), n) for n in (10, 20)]
    settings = FitSettings(device="cpu")

    def job() -> dict[str, Any]:
        data, _ = FitData.of(*(image_folder(root, PRESETS["mnist"]) for root in roots)).cached(cache)
        return job_of(provenance(data, tmp_path), settings, data, settings.compute())

    before, edited = job(), roots[0] / "b" / "1.bmp"
    Image.fromarray(np.full((28, 28), 99, np.uint8)).save(edited)
    os.utime(edited, ns=(0, 1))  # Two writes may fall into one tick of the file system's clock.
    after = job()
    assert after["train"] == before["train"] and after != before
    assert job() == after


def test_another_configuration_is_another_job(tmp_path: Path) -> None:
    data = FitData.of(*(image_folder(write_bitmaps(tmp_path / str(n), n), PRESETS["mnist"]) for n in (10, 20)))
    file, settings = tmp_path / "config.json", FitSettings(device="cpu")
    jobs = []
    for config in ({"layer_norm_eps": 1e-6}, {"layer_norm_eps": 1e-12}, {"layer_norm_eps": 1e-6}):
        file.write_text(json.dumps(config))
        jobs.append(job_of(provenance(data, tmp_path), settings, data, settings.compute(), file))
    assert jobs[0] == jobs[2] != jobs[1]
    assert str(tmp_path) not in json.dumps(jobs)


RESIZED = replace(PRESETS["mnist"], height=32, width=20)


def job_from(data: FitData, cache: Scratch | None) -> FitJob:
    return FitJob(data, FitSettings(device="cpu"), Compute(torch.device("cpu")), cache=cache)


def digits(data_root: Path, preprocess: Preprocess, max_images: int | None = None) -> FitData:
    train, val = (open_dataset(f"mnist:{data_root}", split=split, preprocess=preprocess) for split in ("train", "val"))
    return FitData.of(train, val, max_images=max_images)


@pytest.fixture
def without_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "rate", lambda *_: 10.0)
    monkeypatch.setattr(estimate, "timed_fit", lambda _net, _job, size, _bad: (1.0, 100 * size))


@pytest.mark.usefixtures("without_fits")
@pytest.mark.parametrize("max_images", [None, 700])
def test_disk_is_what_the_images_in_use_take(data_root: Path, max_images: int | None) -> None:
    for preprocess, size in ((PRESETS["mnist"], 0), (RESIZED, 32 * 20)):
        data = digits(data_root, preprocess, max_images)
        taken = (len(data.train) + len(data.val)) * size
        for where, expected in ((Scratch(), taken), (Scratch(processes=2), 2 * taken), (None, 0)):
            found = estimate.estimate(torch.nn.Identity(), job_from(data, where), 0)
            assert (found.pixels, found.features) == (expected, 100 * len(data.train))


@pytest.mark.parametrize(("images", "expected"), [(3000, 31.0), (300, 4.0), (100, 4.0)])
def test_a_line_through_two_fits(images: int, expected: float) -> None:
    assert estimate.extrapolate((100, 300), (2.0, 4.0), images) == pytest.approx(expected)


def test_fits_that_are_too_noisy_still_grow() -> None:
    assert estimate.extrapolate((100, 300), (5.0, 3.0), 900) == pytest.approx(3.0 + 600 * 3.0 / 300 / 2)
    assert estimate.extrapolate((300, 300), (5.0, 3.0), 300) == 3.0


def test_classes_and_speed_decide_how_many_images_are_tried() -> None:
    train = opened("mnist", "train")
    few, all_of_them = estimate.FIT_IMAGES[0], len(train)
    assert estimate.fit_images(0.1, train) == few
    assert estimate.fit_images(1e9, train) == min(estimate.FIT_IMAGES[1], all_of_them)
    many = replace(train, classes=tuple(map(str, range(200))))
    assert estimate.fit_images(0.1, many) == min(2400, all_of_them)


@pytest.mark.parametrize(
    ("job", "flags"),
    [("tiny_job", ["--risk", "0.05", "--density", "gda", "--layer", "0", "--pca", "50"]), ("angle_job", [])],
)
def test_dry_run_writes_nothing(
    job: str, flags: list[str], tmp_path: Path, run: Run, request: pytest.FixtureRequest
) -> None:
    words = [*request.getfixturevalue(job).args, *flags, "--dry-run", "--out", str(tmp_path / "b")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "rate", lambda *_: 1e9)  # A network so fast that all images would be tried.
        out, _ = run(cli.main, *words)
        assert "just run it, without --dry-run (nothing written)" in out and "chosen layer" not in out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "rate", lambda *_: 1.0)
        out, _ = run(cli.main, *words)
    assert "chosen layer" in out and "nothing written" in out and list(tmp_path.iterdir()) == []
    _, err = run(cli.main, *words, "--size", "32", "--cache", tmp_path / "nowhere", code=2)
    assert "No such file or directory" in err
