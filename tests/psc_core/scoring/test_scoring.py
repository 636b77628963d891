"""Offline scoring: inputs, rows, parts, restarts, several processes, and images that cannot be read."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from psc_core import PSC, PSCRegressor, load_model, open_dataset
from psc_core.answers import ClassificationAnswer, RegressionAnswer
from psc_core.cli import score as cli
from psc_core.errors import DataError, UsageError
from psc_core.pipeline import Pipeline
from psc_core.scoring import (
    INPUT_FILE,
    OUT_FILE,
    VERSION_FILE,
    NamedImage,
    PartCount,
    PartWriter,
    check_same,
    columns_of,
    dataset_outputs,
    errors_in,
    in_parts,
    merge,
    named_images,
    write,
    write_parts,
)
from tests import warm
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.opened import loaded, opened
from tools.forge import ALLOW

COUNT = 20
PART = 6


def run(source: Path, out: Path, *flags: str) -> None:
    command = [str(source), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--device", "cpu"]
    assert cli.main([*command, "--part-images", str(PART), "--format", "jsonl", *flags]) == 0


def run_all_bad(source: Path, out: Path) -> None:
    command = [str(source), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--device", "cpu"]
    assert cli.main([*command, "--part-images", str(PART)]) == 1


def rows_of(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("part-*.jsonl"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def bytes_of(out: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in out.iterdir()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in two folders, a damaged image, and a file that is no image."""
    root = tmp_path_factory.mktemp("images")
    data = opened("mnist")
    for index in range(COUNT):
        file = root / f"{index % 2}" / f"{index:03d}.png"
        file.parent.mkdir(exist_ok=True)
        Image.fromarray(data.image(index)[0]).save(file)
    (root / "0" / "damaged.png").write_bytes((root / "0" / "000.png").read_bytes()[:80])
    (root / "0" / "notes.txt").write_text("no image")
    return root


@pytest.fixture(scope="module")
def scored(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its outputs as JSON lines, from one uninterrupted process."""
    out = tmp_path_factory.mktemp("out") / "scores"
    run(folder, out)
    return out


def parquet_rows(out: Path) -> list[dict[str, Any]]:
    files = sorted(out.glob("*.parquet"))
    return [row for file in files for row in parquet.read_table(file).to_pylist(maps_as_pydicts="strict")]


def test_rows_are_the_predictions_of_the_images_in_order(folder: Path, scored: Path) -> None:
    rows = rows_of(scored)
    names = [row["item"] for row in rows]
    assert names == sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    assert len(bytes_of(scored)) == 2 + -(-len(rows) // PART)
    good = [row for row in rows if row["error"] is None]
    assert len(good) == COUNT
    prediction = PSC.load(SHIPPED_BUNDLE, device="cpu").predict([folder / row["item"] for row in good])
    assert [row["label"] for row in good] == list(prediction.labels)
    assert [row["decision"] for row in good] == list(prediction.decision)
    assert [row["prediction_set"] for row in good] == [list(each) for each in prediction.prediction_set]
    for name in ("log_density", "ood_p_value", "probabilities", "is_ood"):
        assert [row[name] for row in good] == pytest.approx(getattr(prediction, name).numpy(), rel=1e-6, abs=1e-4)


def test_maps_are_written_by_part_and_row_and_parts_without_theirs_computed_again(
    tiny_bundle: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, maps = ("--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network"), tmp_path / "maps"
    run(folder, tmp_path / "scores", *own)
    before, rows = bytes_of(tmp_path / "scores"), rows_of(tmp_path / "scores")
    for there in (0, COUNT + 1):
        capsys.readouterr()
        run(folder, tmp_path / "scores", *own, "--maps", str(maps))
        printed = capsys.readouterr().out
        assert f"{COUNT + 1} images, {there} of them were there already, 1 with an error" in printed
        assert "1 .txt" in printed and len(list(maps.glob("*.png"))) == COUNT
    assert bytes_of(tmp_path / "scores") == before
    next(maps.glob("00002-*")).unlink()
    run(folder, tmp_path / "scores", *own, "--maps", str(maps))
    good = [(number, row) for number, row in enumerate(rows) if row["error"] is None]
    scores, *names = sorted((file.name for file in maps.iterdir()), key=lambda name: (name != OUT_FILE, name))
    assert scores == OUT_FILE
    assert names == [f"{number // PART:05d}-{number % PART:04d}.png" for number, _ in good]
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    expected = psc.predict([folder / row["item"] for _, row in good], maps=True).maps
    assert expected is not None
    for name, grey in zip(names, expected.numpy(), strict=True):
        with Image.open(maps / name) as picture:
            assert np.abs(np.asarray(picture).astype(int) - grey).max() <= 1


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_errors_of_a_part_that_is_there_are_counted(tmp_path: Path, form: str) -> None:
    writer = PartWriter(PSC.load(SHIPPED_BUNDLE, device="cpu"), tmp_path, form)
    images = [NamedImage("a", b""), NamedImage("b", str(SHIPPED_BUNDLE / "examples" / "clean.png"))]
    assert [writer(0, images), writer(0, images)] == [PartCount(2, 1, written=True), PartCount(2, 1, written=False)]


def test_maps_belong_to_the_rows(
    tiny_bundle: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(tiny_bundle)
    maps, out, image = tmp_path / "maps", tmp_path / "out", tmp_path / "image.png"
    shutil.copy(folder / "1" / "001.png", image)
    images, only = [NamedImage("image.png", str(image))], maps / "00000-0000.png"
    time.sleep(0.05)
    assert PartWriter(model, out, "jsonl")(0, images).written
    writer = PartWriter(model, out, "jsonl", maps=maps)

    def full(file: Path, data: bytes) -> None:
        file.write_text(str(data[:9]))
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match=rf"No space left on device: '{only}'"):
            writer(0, images)
    assert [file.name for file in maps.iterdir()] == [OUT_FILE]
    assert [writer(0, images).written, writer(0, images).written] == [True, False]
    with pytest.raises(UsageError, match="other rows"):
        PartWriter(model, tmp_path / "second", "jsonl", maps=maps)
    os.utime(only, (0, 0))  # The clock of another file system.
    assert not writer(0, images).written
    time.sleep(0.05)
    shutil.copy(folder / "1" / "003.png", image)
    assert writer(0, images).written and only.stat().st_mtime > 0
    (maps / "_00007-0000.png.killed.partial").touch()
    (out / "__input.kil-led.partial").touch()
    time.sleep(0.05)
    PartWriter(model, out, "jsonl", maps=maps).check_no_more(1)
    assert not [*tmp_path.rglob("*.partial")]
    image.write_bytes(b"damaged")
    assert writer(0, images).errors == 1 and not only.exists()


def test_maps_are_of_no_rows_before_the_first_is_written(tiny_bundle: Path, folder: Path, tmp_path: Path) -> None:
    model = loaded(tiny_bundle)
    maps, images = tmp_path / "maps", [NamedImage("1.png", str(folder / "1" / "001.png"))]
    mistyped, writer = (PartWriter(model, tmp_path / name, "jsonl", maps=maps) for name in ("mistyped", "out"))
    assert writer(0, images).written
    with pytest.raises(UsageError, match="other rows"):
        mistyped(0, images)
    assert not [*(tmp_path / "mistyped").glob("part-*")]


def test_a_bundle_without_a_map_writes_none(folder: Path, tmp_path: Path) -> None:
    model = PSC.load(SHIPPED_BUNDLE, device="cpu")
    without = Pipeline(model.pipeline.scorer, model.pipeline.calibration_scores, model.pipeline.checks)
    with pytest.raises(UsageError, match="has no map"):
        PartWriter(replace(model, pipeline=without), tmp_path, "jsonl", maps=tmp_path / "maps")
    assert not (tmp_path / "maps").exists()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_regression_gives_its_numbers(angle_bundle: Path, folder: Path, tmp_path: Path, form: str) -> None:
    allow = "tests.tiny:network"
    run(folder, tmp_path, "--bundle", str(angle_bundle), "--allow-factories", allow, "--format", form)
    rows = parquet_rows(tmp_path) if form == "parquet" else rows_of(tmp_path)
    (bad,) = (row for row in rows if row["error"] is not None)
    assert {value for name, value in bad.items() if name not in ("item", "error")} == {None}
    good = [row for row in rows if row["error"] is None]
    assert len(good) == COUNT
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=[allow])
    prediction = model.predict([folder / row["item"] for row in good])
    for image, row in enumerate(good):
        assert row.pop("target") == {"name": "angle", "unit": "degrees"}
        fields = {name: value for name, value in row.items() if name not in ("item", "error")}
        assert list(fields) == [name for name in RegressionAnswer.model_fields if name != "explanation"]
        answer = RegressionAnswer.model_validate(fields)
        assert answer.decision == prediction.decision[image] and answer.is_ood == bool(prediction.is_ood[image])
        assert [answer.lower, answer.upper] == pytest.approx(prediction.interval[image].tolist(), rel=1e-4, abs=1e-3)
        for name in ("mean", "aleatoric", "epistemic", "log_density", "ood_score", "ood_p_value"):
            assert getattr(answer, name) == pytest.approx(float(getattr(prediction, name)[image]), rel=1e-4, abs=1e-3)
        assert answer.checks == pytest.approx({name: float(each[image]) for name, each in prediction.checks.items()})


def test_an_image_that_cannot_be_read_is_a_row_with_its_error(scored: Path) -> None:
    (bad,) = (row for row in rows_of(scored) if row["error"] is not None)
    assert bad["item"] == str(Path("0", "damaged.png"))
    columns = [name for name in ClassificationAnswer.model_fields if name not in ("top", "explanation")]
    assert list(bad) == ["item", *columns, "error"]
    assert {bad[name] for name in columns} == {None}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("task", ["tiny_bundle", "angle_bundle"])
def test_an_image_with_outputs_that_are_not_finite_is_a_row_with_its_error(
    task: str, form: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = loaded(request.getfixturevalue(task))
    names = [f"{index % 2}/{index:03d}.png" for index in range(4)]
    images = [NamedImage(name, str(folder / name)) for name in names]
    whole = PartWriter(model, tmp_path, form).columns(images)
    hook = model.pipeline.register_forward_hook(lambda _module, _inputs, packed: _spoil(packed))
    count = PartWriter(model, tmp_path, form)(0, images)
    hook.remove()
    assert count == PartCount(4, 2, written=True)
    expected = [None, "the network's outputs are not finite", "the network's outputs are not finite", None]
    assert errors_in(tmp_path / f"part-00000.{form}") == list(zip(names, expected, strict=True))
    if form == "jsonl":
        rows = rows_of(tmp_path)
        assert [row["decision"] for row in rows] == [whole["decision"][0], None, None, whole["decision"][3]]
        assert {value for name, value in rows[1].items() if name not in ("item", "error")} == {None}


def _spoil(packed: torch.Tensor) -> torch.Tensor:
    packed[1, 0], packed[2] = torch.inf, torch.nan
    return packed


def test_a_hostile_folder_is_rows_with_errors(tmp_path: Path) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    (images / "good.png").write_bytes((SHIPPED_BUNDLE / "examples" / "clean.png").read_bytes())
    os.mkfifo(images / "pipe.png")
    (images / "zero.png").symlink_to("/dev/zero")
    with (images / "sparse.png").open("wb") as file:
        file.truncate(40 << 30)
    run(images, out)
    errors = {row["item"]: row["error"] for row in rows_of(out)}
    assert errors.pop("good.png") is None and set(errors) == {"pipe.png", "zero.png", "sparse.png"}
    assert all(error.startswith(("expected a regular file", "expected a file of at most")) for error in errors.values())


@pytest.mark.parametrize("bundle", ["shipped_bundle", "angle_bundle"])
def test_a_part_without_any_image(bundle: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = loaded(request.getfixturevalue(bundle))
    images = [NamedImage("a", b""), NamedImage("b", str(tmp_path / "missing.png"))]
    assert PartWriter(model, tmp_path, "jsonl")(0, images) == PartCount(2, 2, written=True)
    columns = [name for name in model.task.answer_type.model_fields if name not in ("top", "explanation")]
    for row in rows_of(tmp_path):
        assert {*row} >= {"item", *columns, "error"} and row["error"] is not None


def test_two_processes_write_what_one_writes(
    folder: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("1", "0"):
        monkeypatch.setenv("RANK", rank)
        run(folder, tmp_path / "out")
    assert bytes_of(tmp_path / "out") == bytes_of(scored)


def test_processes_that_start_together_do_not_refuse_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one writes the bundle's version, another looks."""
    file, write_text = tmp_path / VERSION_FILE, Path.write_text

    def interrupted(path: Path, text: str, **options: Any) -> None:
        write_text(path, "")
        monkeypatch.setattr(Path, "write_text", write_text)
        check_same(file, "abc", "another bundle")
        write_text(path, text, **options)

    monkeypatch.setattr(Path, "write_text", interrupted)
    check_same(file, "abc", "another bundle")
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    before = file.stat().st_ino, file.stat().st_mtime_ns
    check_same(file, "abc", "another bundle")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    with pytest.raises(UsageError, match="abc"):
        check_same(file, "abd", "another bundle")


def test_in_python_a_folder_of_other_outputs_is_refused(folder: Path, tmp_path: Path) -> None:
    model, out = load_model(SHIPPED_BUNDLE, device="cpu"), str(tmp_path / "new" / "out")
    other = shutil.copytree(folder / "0", tmp_path / "other")

    def score(bundle: Any, source: Path, form: str = "jsonl") -> list[PartCount]:
        return list(write_parts(PartWriter(bundle, out, form), in_parts(named_images(str(source)), 100)))

    assert [each.written for each in score(model, folder / "0") + score(model, folder / "0")] == [True, False]
    with pytest.raises(UsageError, match="other images"):
        score(model, other)
    with pytest.raises(UsageError, match="another bundle"):
        score(replace(model, version="0123456789ab"), folder / "0")
    with pytest.raises(UsageError, match="another format"):
        score(model, folder / "0", "parquet")


def test_runs_that_begin_together_do_not_mix(folder: Path, tmp_path: Path) -> None:
    model = load_model(SHIPPED_BUNDLE, device="cpu")
    parts = [next(in_parts(named_images(folder / name), 2)) for name in ("0", "1")]
    first, second, same = (PartWriter(model, tmp_path, "jsonl") for _ in range(3))
    computed = first.columns(parts[0])

    def columns(*_: Any) -> Any:
        assert second(0, parts[1]).written
        return computed

    first.columns = columns  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="other images"):
        first(0, parts[0])
    assert [row["item"] for row in rows_of(tmp_path)] == [each.name for each in parts[1]]
    assert sorted(bytes_of(tmp_path)) == [VERSION_FILE, INPUT_FILE, "part-00000.jsonl"]
    assert not same(0, parts[1]).written
    with pytest.raises(UsageError, match="other images"):
        PartWriter(model, tmp_path, "jsonl")(0, parts[0])
    (tmp_path / "_part-00001.jsonl.killed.partial").touch()
    time.sleep(0.05)
    list(write_parts(PartWriter(model, tmp_path, "jsonl"), parts[1:]))
    assert not [*tmp_path.glob("*.partial")]


def test_a_run_that_comes_later_does_not_name_the_folder(folder: Path, tmp_path: Path) -> None:
    model = load_model(SHIPPED_BUNDLE, device="cpu")
    parts = [next(in_parts(named_images(folder / name), 2)) for name in ("0", "1")]
    first, second = (PartWriter(model, tmp_path, "jsonl") for _ in range(2))
    assert first(0, parts[0]).written
    before = bytes_of(tmp_path)
    for number in range(2):
        with pytest.raises(UsageError, match="other images"):
            second(number, parts[1])
    assert bytes_of(tmp_path) == before and not first(0, parts[0]).written


def test_a_list_that_has_grown_may_name_an_image_twice(folder: Path, tmp_path: Path) -> None:
    model, source = load_model(SHIPPED_BUNDLE, device="cpu"), tmp_path / "list.txt"
    names = [str(folder / "1" / f"{index:03d}.png") for index in (1, 3, 5, 7, 7, 9)]
    for count, order in ((3, (0, 1)), (6, (2, 1, 0))):  # Another process comes first.
        source.write_text("\n".join(names[:count]))
        parts = [*in_parts(named_images(source), 2)]
        for number in order:
            PartWriter(model, tmp_path / "out", "jsonl")(number, parts[number])
    assert [row["item"] for row in rows_of(tmp_path / "out")] == names


def test_a_process_reads_each_of_its_parts_once(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(folder, tmp_path / "out")
    read: list[str] = []
    monkeypatch.setattr("psc_core.scoring.errors_in", lambda file: read.append(file.name) or errors_in(file))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run(folder, tmp_path / "out")
    assert read == [f"part-{number:05d}.jsonl" for number in range(1, -(-(COUNT + 1) // PART), 2)]


@pytest.mark.thorough
def test_a_killed_run_goes_on(folder: Path, scored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "psc_core.cli.score", str(folder), "--bundle", str(SHIPPED_BUNDLE)]
    options = ["--out", str(out), "--part-images", str(PART), "--format", "jsonl", "--device", "cpu"]
    with warm.Process([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not (out / "part-00000.jsonl").exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    (out / "_part-00003.jsonl.killed.partial").write_text("half a part")
    before = {file: file.stat().st_mtime_ns for file in out.glob("part-*.jsonl")}
    run(folder, out)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert bytes_of(out) == bytes_of(scored)


Refuse = Callable[..., str]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run ``psc-score``, which must refuse; what it says."""

    def run_refused(source: Path, out: Path, *flags: str) -> str:
        command = [str(source), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--format", "jsonl"]
        assert cli.main([*command, "--device", "cpu", "--part-images", str(PART), *flags]) == 2
        return capsys.readouterr().err

    return run_refused


def test_refuses_outputs_of_other_images_or_of_another_bundle(
    folder: Path, scored: Path, tmp_path: Path, refused: Refuse
) -> None:
    out, fewer = tmp_path / "out", shutil.copytree(folder, tmp_path / "fewer")
    run(fewer, out)
    assert "other images" in refused(folder / "1", out) and "other images" in refused(folder, out)
    for row in rows_of(scored)[2 * PART :]:
        (fewer / row["item"]).unlink()
    assert "part-00002.jsonl" in refused(fewer, out)
    for surplus in ("part-00002.jsonl", "part-00003.jsonl"):
        (out / surplus).unlink()
    run(fewer, out)
    (out / VERSION_FILE).write_text("0123456789ab\n")
    assert "another bundle" in refused(fewer, out)


def test_refuses_before_a_model_is_loaded_or_ray_starts(
    folder: Path, scored: Path, tmp_path: Path, refused: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    parquet.write_table(pa.table({"image": [b""]}), tmp_path / "images.parquet")
    out = shutil.copytree(scored, tmp_path / "out")
    monkeypatch.setattr("psc_core.model.load_model", None)
    monkeypatch.setattr("psc_core.scoring.write_on_ray", None)
    for flags in ((), ("--ray", "2")):
        assert "other images" in refused(folder / "1", out, *flags)
        assert "another format" in refused(folder, out, "--format", "parquet", *flags)
        new, maps = tmp_path / "new", tmp_path / "maps"
        assert "no column 'x'" in refused(
            tmp_path / "images.parquet", new, "--column", "x", "--maps", str(maps), *flags
        )
        assert not new.exists() and not maps.exists()
    (out / VERSION_FILE).write_text("0123456789ab\n")
    assert "another bundle" in refused(folder, out, "--ray", "2")


def test_an_image_that_was_written_again_is_scored_again(folder: Path, tmp_path: Path) -> None:
    copy, out = shutil.copytree(folder, tmp_path / "copy"), tmp_path / "out"
    run(copy, out)
    before = {file.name: file.stat().st_mtime_ns for file in out.glob("part-*.jsonl")}
    damaged = next(row for row in rows_of(out) if row["error"])
    (copy / damaged["item"]).write_bytes((copy / "0" / "000.png").read_bytes())
    run(copy, out)
    assert not any(row["error"] for row in rows_of(out))
    at = [row["item"] for row in rows_of(out)].index(damaged["item"])
    assert [name for name, time in before.items() if (out / name).stat().st_mtime_ns != time] == [
        f"part-{at // PART:05d}.jsonl"
    ]


def test_other_names_are_refused_before_a_part_is_written_and_more_images_at_the_end_are_not(
    folder: Path, tmp_path: Path, refused: Refuse
) -> None:
    copy, out = shutil.copytree(folder / "1", tmp_path / "copy"), tmp_path / "out"
    first, *_, last = sorted(copy.iterdir())
    for removed in (None, "part-00000.jsonl"):
        run(copy, out)
        if removed:
            (out / removed).unlink()
        before = bytes_of(out)
        shutil.copy(first, copy / "000.png")
        assert "other images" in refused(copy, out) and bytes_of(out) == before
        (copy / "000.png").unlink()
        run(copy, out)
    for number in range(PART):
        shutil.copy2(last, copy / f"9{number}.png")  # As old as the others.
    run(copy, out)
    assert [row["item"] for row in rows_of(out)] == sorted(each.name for each in copy.iterdir())
    model = load_model(SHIPPED_BUNDLE, device="cpu")
    before = bytes_of(out)
    with pytest.raises(UsageError, match="other images"):
        PartWriter(model, out, "jsonl")(0, next(in_parts(named_images(copy), PART + 1)))
    assert bytes_of(out) == before


def test_an_image_that_changed_in_the_meantime_is_scored_again_and_one_with_another_mode_is_not(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, others = tmp_path / "image.png", sorted((folder / "1").iterdir())
    shutil.copy(others[0], image)
    writer = PartWriter(load_model(SHIPPED_BUNDLE, device="cpu"), tmp_path / "out", "jsonl")
    images, columns, replace_file = [NamedImage("image.png", str(image))], writer.columns, Path.replace

    def changed(*given: Any) -> Any:
        computed = columns(*given)
        shutil.copy(others[1], image)
        return computed

    def renamed(partial: Path, file: Path) -> Path:
        assert file.name != "part-00000.jsonl" or partial.stat().st_mtime_ns <= image.stat().st_mtime_ns
        return replace_file(partial, file)

    time.sleep(0.05)
    writer.columns = changed  # type: ignore[method-assign]
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", renamed)
        assert writer(0, images).written
    writer.columns = columns  # type: ignore[method-assign]
    time.sleep(0.05)
    assert writer(0, images).written and not writer(0, images).written
    time.sleep(0.05)
    image.chmod(0o600)
    shutil.copy2(image, tmp_path / "restored.png")
    (tmp_path / "restored.png").replace(image)
    assert not writer(0, images).written
    image.touch()
    with monkeypatch.context() as patched:
        patched.setattr(os, "utime", Mock(side_effect=PermissionError))
        assert writer(0, images).written


def test_an_image_that_could_not_be_opened_is_tried_again_and_a_damaged_one_is_not(
    folder: Path, tmp_path: Path
) -> None:
    away, damaged = shutil.copytree(folder / "1", tmp_path / "away"), folder / "0" / "damaged.png"
    first = sorted(away.iterdir())[0]
    time.sleep(0.05)
    writer = PartWriter(load_model(SHIPPED_BUNDLE, device="cpu"), tmp_path / "out", "jsonl")
    images = [NamedImage("a", str(tmp_path / "here" / first.name)), NamedImage("b", str(damaged))]
    assert [writer(0, images), writer(0, images)] == [PartCount(2, 2, written=True), PartCount(2, 2, written=False)]
    away.replace(tmp_path / "here")
    assert [writer(0, images), writer(0, images)] == [PartCount(2, 1, written=True), PartCount(2, 1, written=False)]


def test_another_table_with_as_many_rows_is_refused(folder: Path, tmp_path: Path, refused: Refuse) -> None:
    digits = sorted(folder.glob("*/*.png"))[: 2 * PART]
    for name, files in (("one", digits[:PART]), ("other", digits[PART:])):
        table = pa.table({"image": [file.read_bytes() for file in files]})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    run(tmp_path / "one.parquet", tmp_path / "out")
    assert "other images" in refused(tmp_path / "other.parquet", tmp_path / "out")
    (tmp_path / "other.parquet").replace(tmp_path / "one.parquet")
    assert "other images" in refused(tmp_path / "one.parquet", tmp_path / "out")


def test_maps_are_not_written_among_the_images(folder: Path, tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "link").symlink_to(folder)
    for maps in (folder, folder / "maps", tmp_path / "link" / "0" / "maps"):
        assert "lies in" in refused(folder, tmp_path / "out", "--maps", str(maps))
    assert not (tmp_path / "out").exists() and {each.name for each in folder.iterdir()} == {"0", "1"}
    copy = shutil.copytree(folder / "1", tmp_path / "copy")
    run(copy, tmp_path / "out", "--maps", str(copy / ".maps"))


def test_refuses_a_link_and_an_input_without_images(tmp_path: Path, refused: Refuse) -> None:
    out, empty, elsewhere = tmp_path / "out", tmp_path / "in", tmp_path / "elsewhere"
    empty.mkdir()
    assert "does not exist" in refused(empty / "missing", out) and not out.exists()
    assert "has no images" in refused(empty, out)
    out.mkdir(exist_ok=True)
    (out / VERSION_FILE).unlink(missing_ok=True)
    (out / VERSION_FILE).symlink_to(elsewhere)
    assert "is a link" in refused(SHIPPED_BUNDLE / "examples", out) and not elsewhere.exists()


def test_parquet_in_and_out(folder: Path, scored: Path, tmp_path: Path) -> None:
    files = [folder / row["item"] for row in rows_of(scored)]
    cells = [
        {"bytes": file.read_bytes() if number % 2 else None, "path": str(file)} for number, file in enumerate(files)
    ]
    columns = {"image": cells, "plain": [file.read_bytes() for file in files], "number": list(range(len(files)))}
    parquet.write_table(pa.table(columns), tmp_path / "images.parquet", row_group_size=5)
    for column in ("image", "plain"):
        out = tmp_path / column
        run(tmp_path / "images.parquet", out, "--format", "parquet", "--column", column)
        rows = parquet_rows(out)
        assert [row.pop("item") for row in rows] == [str(number) for number in range(len(files))]
        for row, expected in zip(rows, rows_of(scored), strict=True):
            assert row == {name: value for name, value in expected.items() if name != "item"}
        run(tmp_path / "images.parquet", out, "--format", "parquet", "--column", column)
        assert parquet.read_table(out).num_rows == len(files), "the folder is a data set as it is"
    with pytest.raises(UsageError, match="image, plain, number"):
        list(named_images(tmp_path / "images.parquet", "x"))
    with pytest.raises(UsageError, match="bytes, paths or structs"):
        list(named_images(tmp_path / "images.parquet", "number"))


def test_actors_write_what_one_process_writes(
    folder: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def rows_here(shards: int, override_num_blocks: int) -> Any:
        """Ray's data, in this process."""

        def mapped(make: Callable[..., Any], *, fn_constructor_args: Any, concurrency: int, **_: Any) -> Any:
            actors = [make(*fn_constructor_args) for _ in range(concurrency)]
            return SimpleNamespace(iter_rows=lambda: (actors[row % concurrency]({"id": row}) for row in range(shards)))

        assert override_num_blocks == shards
        return SimpleNamespace(map=mapped)

    monkeypatch.setattr("psc_core.scoring.needs", lambda *_: SimpleNamespace(range=rows_here))
    run(folder, tmp_path / "out", "--ray", "2")
    assert f"{COUNT + 1} images" in capsys.readouterr().out
    assert bytes_of(tmp_path / "out") == bytes_of(scored)


@pytest.mark.slow
def test_ray_writes_what_one_process_writes(
    folder: Path, scored: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    command = [sys.executable, "-m", "psc_core.cli.score", str(folder), "--bundle", str(SHIPPED_BUNDLE)]
    options = ["--out", str(tmp_path / "out"), "--part-images", str(PART), "--format", "jsonl", "--device", "cpu"]
    done = subprocess.run(
        [*command, *options, "--ray", "2"], cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert f"{COUNT + 1} images" in done.stdout
    assert bytes_of(tmp_path / "out") == bytes_of(scored)


def test_list_of_paths(folder: Path, scored: Path, tmp_path: Path) -> None:
    paths = [str(folder / row["item"]) for row in rows_of(scored)]
    (tmp_path / "list.txt").write_text("\n".join(paths[:3]) + "\n\n" + paths[3] + "\r\n")
    assert [each.image for each in named_images(tmp_path / "list.txt")] == paths[:4]


@pytest.mark.parametrize("form", ["utf-8", "utf-8-sig", "utf-16", "csv", "tsv", "parquet"])
def test_paths_are_relative_to_the_file_that_lists_them(
    form: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, name = tmp_path / f"list.{form}", "u\N{COMBINING DIAERESIS} 1.png"
    paths = [name, str(folder / "0" / "000.png"), "missing.png"]
    shutil.copy(folder / "1" / "001.png", tmp_path / name)
    if form == "parquet":
        parquet.write_table(pa.table({"image": [path.encode() for path in paths]}), source)
    elif form in ("csv", "tsv"):
        mark = ";" if form == "csv" else "\t"
        source.write_text(f"label{mark}FILE\n" + "".join(f"7{mark}{path} \n" for path in paths))
    else:
        composed = [unicodedata.normalize("NFC", path) for path in paths]
        source.write_text("".join(f"{path} \n   \n" for path in composed), encoding=form)
    monkeypatch.chdir(folder)
    found = [*named_images(source)]
    assert [each.image for each in found] == [str(tmp_path / path) for path in paths]
    if form != "parquet":
        assert [each.name for each in found] == paths


def test_what_is_no_list_is_refused(folder: Path, tmp_path: Path, refused: Refuse) -> None:
    (tmp_path / "zeros.txt").write_bytes(b"a.png\0b.png\0")
    shutil.make_archive(str(tmp_path / "packed"), "gztar", folder)
    Image.new("L", (9, 9)).save(tmp_path / "grey.jpg")
    for file in ("zeros.txt", "packed.tar.gz", "grey.jpg"):
        assert "one path a line" in refused(tmp_path / file, tmp_path / "out")
    (tmp_path / "bare.csv").write_text("a.png\nb.png\n")
    assert "add the line file above it" in refused(tmp_path / "bare.csv", tmp_path / "out")
    (tmp_path / "none.csv").write_text("file,label\nmissing.png,1\n")
    assert "none of the files" in refused(tmp_path / "none.csv", tmp_path / "out")
    os.mkfifo(tmp_path / "pipe")
    for source in (tmp_path / "pipe", Path("-")):
        assert "write it to a file" in refused(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_without_any_image_that_can_be_read_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A process of several does not, as torchrun would end the others."""
    monkeypatch.setattr("psc_core.compute.LOG_SECONDS", 0)
    (tmp_path / "list.txt").write_text("missing.png\n")
    run_all_bad(tmp_path / "list.txt", tmp_path / "out")
    printed = capsys.readouterr()
    assert "1 with an error" in printed.out and "scored: 1 images" in printed.err
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    run(tmp_path / "list.txt", tmp_path / "out")


def test_base64_text_is_named(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"image": ["iVBORw0KGgoAAAANSUhEUg" * 9]}), tmp_path / "text.parquet")
    run_all_bad(tmp_path / "text.parquet", tmp_path / "out")
    (row,) = rows_of(tmp_path / "out")
    assert row["error"].endswith("got base64 text; decode it and use these bytes")


def test_a_column_is_of_parquet_files(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "list.txt").touch()
    for source in (folder, tmp_path / "list.txt"):
        with pytest.raises(UsageError, match="picture"):
            named_images(source, "picture")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    whole, torn, noise = (tmp_path / f"{name}.parquet" for name in ("whole", "torn", "noise"))
    parquet.write_table(pa.table({"image": [b"some bytes"] * 9}), whole)
    torn.write_bytes(whole.read_bytes()[:4] + b"\xff" * 20 + whole.read_bytes()[24:])  # The first page of the column.
    noise.write_bytes(b"PAR1 is not enough")
    for file in (torn, noise):
        with pytest.raises(DataError, match=file.name):
            list(named_images(file))


def test_names_that_are_not_unicode(tmp_path: Path) -> None:
    for name in (b"\xfe.png", b"\xff.png"):
        (tmp_path / os.fsdecode(name)).touch()
    found = [*named_images(tmp_path)]
    assert [each.name for each in found] == [r"\xfe.png", r"\xff.png"]
    assert all(Path(str(each.image)).exists() for each in found)


def test_images_stream() -> None:
    taken: list[int] = []

    def images() -> Any:
        for number in range(1_000_000):
            taken.append(number)
            yield NamedImage(str(number), b"")

    assert [each.name for each in next(in_parts(images(), 3))] == ["0", "1", "2"]
    assert len(taken) == 3


def test_outputs_are_those_of_predict(tiny_bundle: Path, data_root: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    data = open_dataset(f"mnist:{data_root}", split="test", preprocess=psc.preprocess).subset(torch.arange(70))
    expected = psc.compute(next(iter(data.batches(70))).images)
    torch.testing.assert_close(dataset_outputs(psc, data, "test").packed, expected.packed, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="read through the model's preprocessing"):
        dataset_outputs(psc, replace(data, preprocess=replace(psc.preprocess, mean=(0.0,))), "test")


OF_ALL = {
    "item": "string", "epistemic": "float", "log_density": "float", "ood_score": "float", "ood_p_value": "float",
    "checks": "map<string, float ('checks')>", "is_ood": "bool", "decision": "string", "error": "string",
}  # fmt: skip
"""Arrow's names of the types of columns."""

OF_TASK = {
    "tiny_bundle": {
        "label": "string", "class_index": "int64", "confidence": "float", "probabilities": "list<element: float>",
        "predictive_entropy": "float", "prediction_set": "list<element: string>",
    },
    "angle_bundle": {
        "target": "struct<name: string, unit: string>", "mean": "float", "aleatoric": "float", "lower": "float",
        "upper": "float",
    },
}  # fmt: skip


@pytest.mark.parametrize("bundle", OF_TASK)
def test_types_of_columns(bundle: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = loaded(request.getfixturevalue(bundle))
    images = next(open_dataset(f"mnist:{ROOT}/tests/data", split="test", preprocess=model.preprocess).batches(3)).images
    columns = merge(list("abcd"), [None, None, "damaged", None], columns_of(model.predict(images), model.task))
    write(columns, model.task.columns(), tmp_path / "part.parquet", 0)
    written = parquet.read_schema(tmp_path / "part.parquet")
    assert {field.name: str(field.type) for field in written} == OF_ALL | OF_TASK[bundle]
