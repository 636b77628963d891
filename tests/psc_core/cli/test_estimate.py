"""``psc-fit --dry-run``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from psc_core import PRESETS, FitSettings, fit_parts, open_dataset
from psc_core.cli import fit
from psc_core.cli import job as estimate
from psc_core.cli.job import Job
from psc_core.data import cache
from psc_core.data.cache import Scratch
from psc_core.fit_data import FitData
from psc_core.images.preprocess import Preprocess
from psc_core.network.described import NetworkSpec
from tests.conftest import TinyJob
from tests.psc_core.cli.support import run


def test_dry_run_writes_nothing(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, fit.main, [*tiny_job.args, "--dry-run", "--out", str(tmp_path / "b")])
    assert code == 0, err
    assert out.index("the original network: accuracy") < out.index("◀ chosen") < out.index("a fit on all images takes")
    assert out.count("◀ chosen") == 1
    assert "GiB of memory" in out and "nothing written" in out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_fits")
def test_dry_run_is_of_the_cache_that_is_asked_for(tiny_job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    args = [*tiny_job.args, "--size", "32", "--dry-run", "--out", str(tmp_path / "b")]
    for flags, code, said in (
        ([], 0, "MiB of disk for decoded images, 1 MiB of disk for features"),
        (["--cache", str(tmp_path)], 0, "MiB of disk for decoded images"),
        (["--cache", "off"], 0, "GiB of memory, 1 MiB of disk for features (from"),
        (["--cache", str(tmp_path / "nowhere")], 2, "No such file or directory; choose another --cache or off"),
    ):
        result, out, err = run(capsys, fit.main, [*args, *flags])
        assert result == code and said in out + err, flags


def test_dry_run_of_a_regression_counts_its_report(
    angle_job, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:  # type: ignore[no-untyped-def]
    reported: list[str] = []
    monkeypatch.setattr(estimate, "collect_fit", lambda model, *_: reported.append(type(model).__name__))
    code, out, err = run(capsys, fit.main, [*angle_job.args, "--dry-run", "--out", str(tmp_path / "b")])
    assert code == 0, err
    assert "nothing written" in out and reported == ["PSCRegressor"] * 3


RESIZED = replace(PRESETS["mnist"], height=32, width=20)


def job_of(data: FitData, cache: Scratch | None) -> Job:
    settings, network = FitSettings(device="cpu"), NetworkSpec("tests.tiny:network", 10)
    return Job(data, settings, settings.compute(), Path("b"), "b", torch.nn.Identity(), network, "", cache)


def digits(data_root: Path, preprocess: Preprocess, max_images: int | None = None) -> FitData:
    train, val = (open_dataset(f"mnist:{data_root}", split=split, preprocess=preprocess) for split in ("train", "val"))
    return FitData.of(train, val, max_images=max_images)


@pytest.fixture
def without_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(estimate, "rate", lambda *_: 100.0)
    monkeypatch.setattr(estimate, "timed_fit", lambda _job, size, _bad: (1.0, 100 * size))


@pytest.mark.usefixtures("without_fits")
@pytest.mark.parametrize(("device", "used"), [("cpu", 0), ("cuda:0", 7), ("cuda:1", 8)])
def test_the_memory_is_that_of_the_gpu_in_use(
    data_root: Path, monkeypatch: pytest.MonkeyPatch, device: str, used: int
) -> None:
    job = job_of(digits(data_root, PRESETS["mnist"]), None)
    on_device = replace(job.compute, device=torch.device(device))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device=None: 7 + (device.index if device else 0))
    assert estimate.estimate(replace(job, compute=on_device), 0).device_memory == used


@pytest.mark.usefixtures("without_fits")
@pytest.mark.parametrize("max_images", [None, 20])
def test_disk_is_what_the_images_in_use_take(data_root: Path, max_images: int | None) -> None:
    for preprocess, size in ((PRESETS["mnist"], 0), (RESIZED, 32 * 20)):
        data = digits(data_root, preprocess, max_images)
        taken = (len(data.train) + len(data.val)) * size
        for where, expected in ((Scratch(), taken), (Scratch(processes=2), 2 * taken), (None, 0)):
            found = estimate.estimate(job_of(data, where), 0)
            assert (found.pixels, found.features) == (expected, 100 * len(data.train))


def test_features_of_a_small_fit_are_counted(
    tiny_job: TinyJob, data_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    create = Scratch.array

    def counted(scratch: Scratch, *given: Any) -> Any:
        array = create(scratch, *given)
        written.append(array.nbytes)
        return array

    monkeypatch.setattr(Scratch, "array", counted)
    fit_to_features = fit_parts._fit_to_features
    sizes: list[int] = []

    def measured(*args: Any) -> Any:
        sizes.append(sum(written))
        return fit_to_features(*args)

    monkeypatch.setattr(fit_parts, "_fit_to_features", measured)
    job = replace(job_of(digits(data_root, PRESETS["mnist"]), None), net=tiny_job.net)
    assert [estimate.timed_fit(job, 80, 0)[1]] == sizes


def test_small_fits_keep_images_where_the_fit_would(
    data_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    used: list[Scratch | None] = []
    disk = SimpleNamespace()

    def cached(data: FitData, where: Scratch | None) -> tuple[FitData, tuple[str, ...]]:
        used.append(where)
        raise KeyboardInterrupt

    monkeypatch.setattr(estimate, "rate", lambda *_: 100.0)
    monkeypatch.setattr(FitData, "cached", cached)
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: disk)
    data = digits(data_root, RESIZED)
    for disk.free, given, expected in (
        (1 << 40, None, None),
        (1 << 40, Scratch(tmp_path), Scratch(tmp_path)),
        (1 << 16, Scratch(tmp_path), None),
    ):
        with pytest.raises(KeyboardInterrupt):
            estimate.estimate(job_of(data, given), 0)
        assert used.pop() == expected
    assert capsys.readouterr().out.count("no room on the disk for ") == 1


@pytest.mark.parametrize(("images", "expected"), [(3000, 31.0), (300, 4.0), (100, 4.0)])
def test_a_line_through_two_fits(images: int, expected: float) -> None:
    assert estimate.extrapolate((100, 300), (2.0, 4.0), images) == pytest.approx(expected)


def test_fits_that_are_too_noisy_still_grow() -> None:
    assert estimate.extrapolate((100, 300), (5.0, 3.0), 900) == pytest.approx(3.0 + 600 * 3.0 / 300 / 2)
    assert estimate.extrapolate((300, 300), (5.0, 3.0), 300) == 3.0


def test_classes_and_speed_decide_how_many_images_are_tried(data_root: Path) -> None:
    train = open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])
    few, all_of_them = estimate.FIT_IMAGES[0], len(train)
    assert estimate.fit_images(0.1, train) == few
    assert estimate.fit_images(1e9, train) == min(estimate.FIT_IMAGES[1], all_of_them)
    many = replace(train, classes=tuple(map(str, range(200))))
    assert estimate.fit_images(0.1, many) == min(2400, all_of_them)


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(7.4, "about 7 s"), (80.0, "about 80 s"), (200.0, "about 3 min"), (11100.0, "about 3 h 05 min")],
)
def test_estimates_read_well(seconds: float, said: str) -> None:
    text = str(estimate.Estimate(300, seconds, 3 << 29, 0, 1 << 30, 1 << 20))
    assert said in text and "1.5 GiB of memory" in text and "GPU" not in text
    assert "1,024 MiB of disk for decoded images, 1 MiB of disk for features (" in text
    assert "2.0 GiB on the GPU" in str(estimate.Estimate(300, seconds, 3 << 29, 1 << 31, 0, 1))
