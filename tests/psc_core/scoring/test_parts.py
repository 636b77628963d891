"""Offline scoring: parts, restarts, several processes, and images that cannot be read."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from psc_core import PSC, PSCRegressor, load_model
from psc_core.answers import ClassificationAnswer, RegressionAnswer
from psc_core.cli import score as cli
from psc_core.errors import UsageError
from psc_core.pipeline import Pipeline
from psc_core.scoring import NamedImage, PartCount, PartWriter, errors_in, named_images
from tests.conftest import ROOT, SHIPPED_BUNDLE
from tests.psc_core.scoring.support import COUNT, PART, bytes_of, rows_of, run, write_hostile


def test_rows_are_the_predictions_of_the_images_in_order(folder: Path, scored: Path) -> None:
    rows = rows_of(scored)
    names = [row["item"] for row in rows]
    assert names == sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    assert len(bytes_of(scored)) == 1 + -(-len(rows) // PART)
    good = [row for row in rows if row["error"] is None]
    assert len(good) == COUNT
    prediction = PSC.load(SHIPPED_BUNDLE, device="cpu").predict([folder / row["item"] for row in good])
    assert [row["label"] for row in good] == list(prediction.labels)
    assert [row["decision"] for row in good] == list(prediction.decision)
    assert [row["prediction_set"] for row in good] == [list(each) for each in prediction.prediction_set]
    for name in ("log_density", "ood_p_value", "probabilities", "is_ood"):
        assert [row[name] for row in good] == pytest.approx(getattr(prediction, name).numpy(), rel=1e-6, abs=1e-4)


def test_maps_are_written_by_part_and_row(tiny_bundle: Path, folder: Path, tmp_path: Path) -> None:
    own = ("--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network")
    run(folder, tmp_path / "scores", *own, "--maps", str(tmp_path / "maps"))
    rows, read = rows_of(tmp_path / "scores"), sorted(file.name for file in (tmp_path / "maps").iterdir())
    good = [(number, row) for number, row in enumerate(rows) if row["error"] is None]
    assert read == [f"{number // PART:05d}-{number % PART:04d}.png" for number, _ in good]
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    maps = psc.predict([folder / row["item"] for _, row in good], maps=True).maps
    assert maps is not None
    for name, grey in zip(read, maps.numpy(), strict=True):
        with Image.open(tmp_path / "maps" / name) as picture:
            assert np.abs(np.asarray(picture).astype(int) - grey).max() <= 1


def test_parts_without_their_maps_are_computed_again(
    tiny_bundle: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = ("--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network")
    run(folder, tmp_path / "scores", *own)
    before = bytes_of(tmp_path / "scores")
    for there in (0, COUNT + 1):
        capsys.readouterr()
        run(folder, tmp_path / "scores", *own, "--maps", str(tmp_path / "maps"))
        printed = capsys.readouterr().out
        assert f"{COUNT + 1} images, {there} of them were there already, 1 with an error" in printed
        assert f"{folder}: not read, by their suffix: 1 .txt; convert" in printed
        assert len(list((tmp_path / "maps").iterdir())) == COUNT
    assert bytes_of(tmp_path / "scores") == before
    next((tmp_path / "maps").glob("00002-*")).unlink()
    run(folder, tmp_path / "scores", *own, "--maps", str(tmp_path / "maps"))
    assert len(list((tmp_path / "maps").iterdir())) == COUNT


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_errors_of_a_part_that_is_there_are_counted(tmp_path: Path, form: str) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    writer = PartWriter(PSC.load(SHIPPED_BUNDLE, device="cpu"), tmp_path, form)
    images = [NamedImage("a", b""), NamedImage("b", str(SHIPPED_BUNDLE / "examples" / "clean.png"))]
    assert [writer(0, images), writer(0, images)] == [PartCount(2, 1, written=True), PartCount(2, 1, written=False)]


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
    if form == "parquet":
        read = pytest.importorskip("pyarrow.parquet").read_table
        files = sorted(tmp_path.glob("part-*"))
        rows = [row for file in files for row in read(file).to_pylist(maps_as_pydicts="strict")]
    else:
        rows = rows_of(tmp_path)
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


def test_a_part_of_a_regression_without_any_image(angle_bundle: Path, tmp_path: Path) -> None:
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    assert PartWriter(model, tmp_path, "jsonl")(0, [NamedImage("a", b"")]).errors == 1
    columns = [name for name in RegressionAnswer.model_fields if name != "explanation"]
    assert list(rows_of(tmp_path)[0]) == ["item", "target", *columns, "error"]


def test_an_image_that_cannot_be_read_is_a_row_with_its_error(scored: Path) -> None:
    (bad,) = (row for row in rows_of(scored) if row["error"] is not None)
    assert bad["item"] == os.path.join("0", "damaged.png")  # noqa: PTH118
    columns = [name for name in ClassificationAnswer.model_fields if name not in ("top", "explanation")]
    assert list(bad) == ["item", *columns, "error"]
    assert {bad[name] for name in columns} == {None}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("task", ["tiny_bundle", "angle_bundle"])
def test_an_image_with_outputs_that_are_not_finite_is_a_row_with_its_error(
    task: str, form: str, folder: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if form == "parquet":
        pytest.importorskip("pyarrow")
    model = load_model(request.getfixturevalue(task), device="cpu", allow_factories=["tests.tiny:network"])
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
    write_hostile(images)
    run(images, out)
    errors = {row["item"]: row["error"] for row in rows_of(out)}
    assert errors.pop("good.png") is None and set(errors) == {"pipe.png", "zero.png", "sparse.png"}
    assert all(error.startswith(("expected a regular file", "expected a file of at most")) for error in errors.values())


def test_does_not_write_through_a_link(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    out.mkdir()
    (out / cli.VERSION_FILE).symlink_to(elsewhere)
    command = [
        str(SHIPPED_BUNDLE / "examples"),
        "--bundle",
        str(SHIPPED_BUNDLE),
        "--out",
        str(out),
        "--format",
        "jsonl",
    ]
    assert cli.main(command) == 2
    assert "is a link" in capsys.readouterr().err and not elsewhere.exists()


def test_part_without_any_image(tmp_path: Path) -> None:
    writer = PartWriter(PSC.load(SHIPPED_BUNDLE, device="cpu"), tmp_path, "jsonl")
    count = writer(0, [NamedImage("a", b""), NamedImage("b", str(tmp_path / "missing.png"))])
    assert (count.images, count.errors) == (2, 2)
    assert [row["error"] is None for row in rows_of(tmp_path)] == [False, False]


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
    file, write_text = tmp_path / cli.VERSION_FILE, Path.write_text

    def interrupted(path: Path, text: str) -> None:
        write_text(path, "")
        monkeypatch.setattr(Path, "write_text", write_text)
        cli.check_version(file, "abc")
        write_text(path, text)

    monkeypatch.setattr(Path, "write_text", interrupted)
    cli.check_version(file, "abc")
    assert [each.name for each in tmp_path.iterdir()] == [file.name]
    before = file.stat().st_ino, file.stat().st_mtime_ns
    cli.check_version(file, "abc")
    assert (file.stat().st_ino, file.stat().st_mtime_ns) == before
    with pytest.raises(UsageError, match="outputs of the bundle abc, this one is abd"):
        cli.check_version(file, "abd")


def test_parts_beyond_the_input_are_refused(
    folder: Path, scored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fewer = shutil.copytree(scored, tmp_path / "out"), shutil.copytree(folder, tmp_path / "fewer")
    for row in rows_of(scored)[2 * PART :]:
        (fewer / row["item"]).unlink()
    command = [str(fewer), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--format", "jsonl", "--device", "cpu"]
    assert cli.main([*command, "--part-images", str(PART)]) == 2
    assert "has part-00002.jsonl, beyond the 2 parts of this input" in capsys.readouterr().err
    for surplus in ("part-00002.jsonl", "part-00003.jsonl"):
        (out / surplus).unlink()
    run(fewer, out)


def test_a_killed_run_goes_on(folder: Path, scored: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "psc_core.cli.score", str(folder), "--bundle", str(SHIPPED_BUNDLE)]
    options = ["--out", str(out), "--part-images", str(PART), "--format", "jsonl", "--device", "cpu"]
    with subprocess.Popen([*command, *options], cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        while not (out / "part-00000.jsonl").exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    (out / "part-00003.partial").write_text("half a part")
    before = {file: file.stat().st_mtime_ns for file in out.glob("part-*.jsonl")}
    run(folder, out)
    assert {file: file.stat().st_mtime_ns for file in before} == before
    assert bytes_of(out) == bytes_of(scored)


def test_refuses_outputs_of_other_images_or_of_another_bundle(
    folder: Path, scored: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = shutil.copytree(scored, tmp_path / "out")
    command = [str(folder / "1"), "--bundle", str(SHIPPED_BUNDLE), "--out", str(out), "--format", "jsonl"]
    assert cli.main(command) == 2
    assert "other images" in capsys.readouterr().err
    (out / cli.VERSION_FILE).write_text("0123456789ab\n")
    assert cli.main(command) == 2
    assert "another --out" in capsys.readouterr().err


def test_parquet_in_and_out(folder: Path, scored: Path, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    files = [folder / row["item"] for row in rows_of(scored)]
    cells = [
        {"bytes": file.read_bytes() if number % 2 else None, "path": str(file)} for number, file in enumerate(files)
    ]
    columns = {"image": cells, "plain": [file.read_bytes() for file in files], "number": list(range(len(files)))}
    parquet.write_table(pa.table(columns), tmp_path / "images.parquet", row_group_size=5)
    for column in ("image", "plain"):
        out = tmp_path / column
        run(tmp_path / "images.parquet", out, "--format", "parquet", "--column", column)
        rows = [
            row
            for file in sorted(out.glob("*.parquet"))
            for row in parquet.read_table(file).to_pylist(maps_as_pydicts="strict")
        ]
        assert [row.pop("item") for row in rows] == [str(number) for number in range(len(files))]
        for row, expected in zip(rows, rows_of(scored), strict=True):
            assert row == {name: value for name, value in expected.items() if name != "item"}
        run(tmp_path / "images.parquet", out, "--format", "parquet", "--column", column)
        assert parquet.read_table(out).num_rows == len(files), "the folder is a data set as it is"
    with pytest.raises(UsageError, match="no column 'x'; it has image, plain, number"):
        list(named_images(tmp_path / "images.parquet", "x"))
    with pytest.raises(UsageError, match="bytes, paths or structs"):
        list(named_images(tmp_path / "images.parquet", "number"))


@pytest.mark.parametrize(("source", "message"), [("missing", "does not exist"), ("", "has no images")])
def test_rejects_an_input_without_images(
    source: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "in"
    root.mkdir()
    command = [str(root / source), "--bundle", str(SHIPPED_BUNDLE), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err
