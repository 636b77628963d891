import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from psc_core import open_dataset
from psc_core.cli import evaluate as cli_eval
from psc_core.images.preprocess import PRESETS
from tests import folders
from tests.conftest import Run, TinyJob
from tests.opened import opened
from tools import forge


@pytest.fixture
def measure(run: Run, tiny_bundle: Path, data_root: Path) -> Run:
    """``psc-eval`` of the tiny bundle on digits, where the flags behind these do not say otherwise."""
    words = ("--bundle", tiny_bundle, "--allow-factories", "tests.tiny:network", "--device", "cpu")
    return partial(run, cli_eval.main, *words, "--id", f"mnist:{data_root}")


def test_report_of_a_regression_has_the_sets_of_its_fit(
    measure: Run, angle_bundle: Path, data_root: Path, tmp_path: Path
) -> None:
    words = ("--bundle", angle_bundle, "--id", f"rotated-mnist:{data_root}", "--out", tmp_path)
    out, _ = measure(*words, "--ood", f"shirts=fashion-mnist:{data_root}")
    assert f"report: {tmp_path}/report.html" in out
    page, numbers = (tmp_path / "report.html").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert all(f'<th scope="row">{name}</th>' in page for name in ("validation", "turned", "test", "shirts"))
    assert f"{numbers['images']} images" in page and f"<td>{numbers['errors']['rmse']:.4g}</td>" in page


def test_eval_replaces_a_report_on_request_only(measure: Run, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("mine")
    printed, err = measure("--out", tmp_path, code=2)
    assert printed == "" and "holds report.json already; give --overwrite" in err
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "mine"
    measure("--out", tmp_path, "--overwrite")
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(cli_eval.WRITTEN)
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 800


def test_a_report_is_not_written_among_the_images(measure: Run, tmp_path: Path) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    for out in (tmp_path, tmp_path / "report"):
        assert f"--out {out} lies in {tmp_path}" in measure("--ood", f"black={tmp_path}", "--out", out, code=2)[1]
    assert [file.name for file in tmp_path.iterdir()] == ["black.png"]


def test_eval_replaces_no_images_that_are_in_a_folder_called_report(measure: Run, tmp_path: Path) -> None:
    words = ("--out", tmp_path, "--overwrite")
    (tmp_path / "report").mkdir()
    for name in ("0001.png", "sizes.png"):
        (tmp_path / "report" / name).write_text("mine")
        printed, err = measure(*words, code=2)
        assert printed == "" and f"{tmp_path / 'report'} holds {name}, of no report in" in err
        assert [file.name for file in tmp_path.rglob("*")] == ["report", name]
        (tmp_path / "report" / name).unlink()
    measure(*words)
    (tmp_path / "report" / "0001.png").write_text("mine")
    measure(*words, code=2)
    assert (tmp_path / "report" / "0001.png").read_text() == "mine"
    (tmp_path / "report" / "0001.png").rename(tmp_path / "report" / "report.md")  # An evaluation beside the figures.
    cli_eval.check_replaced(tmp_path, cli_eval.WRITTEN, overwrite=True)


@pytest.mark.parametrize(
    "extra", [["--ood", "nameless"], ["--weights", "w"], ["--id", "nowhere"], ["--ood", "a=x", "--ood", "a=y"]]
)
def test_eval_rejects_bad_flags(measure: Run, extra: list[str]) -> None:
    _, err = measure(*extra, code=2)
    assert "expected" in err or "is not a directory" in err


def test_a_target_without_a_table_is_refused(measure: Run, data_root: Path, tmp_path: Path) -> None:
    known = write_digits(tmp_path / "known", data_root, "test", 80)
    _, err = measure("--id", known, "--target", "label", code=2)
    assert "no images come from a table, so --target 'label' has no effect" in err
    rows = [f"{file},{file.parent.name},a" for file in known.rglob("*.png")]
    (tmp_path / "known.csv").write_text("\n".join(["file,label,other", *rows]))
    assert "80 images" in measure("--id", tmp_path / "known.csv", "--target", "label")[0]


def test_images_of_other_classes_are_refused_before_baselines_are_fitted(measure: Run, data_root: Path) -> None:
    digits, clothes = f"mnist:{data_root}", f"fashion-mnist:{data_root}"
    _, err = measure("--id", clothes, "--weights", "none", "--train", digits, "--val", digits, code=2)
    assert "expected the model's 10 classes in fashion-mnist" in err


def write_digits(root: Path, data_root: Path, split: str, images: int) -> Path:
    """Write a folder of digits whose classes are called as those of ``mnist``."""
    folders.write_digits(root, data_root, split, images)
    for digit, name in enumerate(folders.NAMES):
        (root / name).rename(root / str(digit))
    return root


def test_images_that_cannot_be_decoded_are_left_out(measure: Run, data_root: Path, tmp_path: Path) -> None:
    known, odd = (write_digits(tmp_path / name, data_root, "test", 80) for name in ("known", "odd"))
    for file in (known / "1" / "bad.png", odd / "bad.png", odd / "worse.png"):
        file.write_bytes(b"text")
    (known / "2" / "copy.png").symlink_to(next((known / "2").glob("[0-9]*.png")))
    (odd / "1.heic").touch()
    words = ("--id", known, "--ood", f"odd={odd}")
    out, err = measure(*words, "--out", tmp_path / "out")
    assert f"{odd}: not read, by their suffix: 1 .heic" in out
    assert f"left out: {known / '1' / 'bad.png'}: " in out and f"left out: {odd / 'worse.png'}: " in out
    assert f"left out 3 that cannot be decoded: 1 of {known}, 2 of {odd}\n" in out
    assert f"warning: 1 of the 81 images of {known} are repeated" in err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["images"], report["ood_images"]) == (81, {"odd": 80})
    _, err = measure(*words, "--max-bad-images", "2", code=2)
    assert "expected at most 2 images that cannot be decoded" in err and "evaluating" not in err


def test_test_images_among_those_that_should_be_found_are_warned_of(
    measure: Run, data_root: Path, tmp_path: Path
) -> None:
    known = write_digits(tmp_path / "known", data_root, "test", 80)
    words = ("--id", known, "--ood", f"same={known}", "--ood", f"shirts=fashion-mnist:{data_root}")
    out, err = measure(*words, "--out", tmp_path / "out")
    assert f"warning: 80 of the 80 images of same are images of {known} too" in err and "of shirts are" not in err
    assert "same: PSC reaches AUROC 0.5" in out and "With alpha" in out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["shared"] == {"same": 80}


@pytest.mark.parametrize(
    ("recorded", "given", "noun"),
    [
        ({}, "--train", "training"),
        ({"val": "sha256"}, None, "validation"),
        ({"recalibrations": ["sha256"]}, None, "calibration"),
        ({}, None, None),
    ],
)
def test_warns_of_images_that_the_model_has_seen(
    tiny_job: TinyJob,
    bundle: Path,
    data_root: Path,
    tmp_path: Path,
    measure: Run,
    recorded: dict[str, Any],
    given: str | None,
    noun: str | None,
) -> None:
    images = write_digits(tmp_path / "images", data_root, "val", 150)
    entry = {"sha256": open_dataset(str(images), split="test", preprocess=PRESETS["mnist"]).digest()}
    provenance = {key: entry if value == "sha256" else [entry] for key, value in recorded.items()}
    forge.edit(bundle, lambda body: body.update(provenance=provenance))
    words = ["--bundle", bundle, "--id", images]
    if given:
        words += ["--weights", tiny_job.weights, "--train", f"mnist:{data_root}", "--val", f"mnist:{data_root}"]
        words += [given, images]
    _, err = measure(*words)
    said = f"warning: 150 of the 150 images of {images} are {noun} images"
    assert (said in err) == (noun is not None) == ("warning" in err)


def test_os_errors_give_one_line(measure: Run, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    printed, err = measure("--out", tmp_path / "file", code=2)
    assert printed == "" and "file" in err and "Traceback" not in err


def test_baselines_without_provenance(tiny_job: TinyJob, bundle: Path, data_root: Path, measure: Run) -> None:
    forge.edit(bundle, lambda body: body.update(collapse={"layers": 5}, provenance={"model": 5}, metrics={}))
    data = f"mnist:{data_root}"
    out, err = measure("--bundle", bundle, "--weights", tiny_job.weights, "--train", data, "--val", data)
    assert "temperature" in out and tiny_job.weights in err


def test_other_weights_than_those_of_the_fit_are_refused(
    tiny_job: TinyJob, data_root: Path, tmp_path: Path, measure: Run
) -> None:
    data, other = f"mnist:{data_root}", tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in tiny_job.net.state_dict().items()}, other)
    assert str(other) in measure("--weights", other, "--train", data, "--val", data, code=2)[1]


def test_eval_writes_its_report(tiny_job: TinyJob, data_root: Path, tmp_path: Path, measure: Run) -> None:
    data = f"dirty-mnist:{data_root}"
    words = ("--id", data, "--ood", f"fashion=fashion-mnist:{data_root}", "--out", tmp_path)
    out, err = measure(*words, "--weights", tiny_job.weights, "--train", data, "--val", data)
    assert "warning" not in err and "fashion" in out
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images"] == 1100 and "mahalanobis++" in report["separation"]["fashion"]
    assert (tmp_path / "report.md").exists()
    page = (tmp_path / "report.html").read_text()
    assert all(f">{name}</th>" in page for name in ("training", "validation", "turned", "test", "fashion"))
    assert report["warnings"] == [] and "Accuracy: fraction of right" not in out


def test_images_of_the_fit_are_named_wherever_the_report_is_read(bundle: Path, tmp_path: Path, measure: Run) -> None:
    digest = opened("mnist").digest()
    forge.edit(bundle, lambda body: body.update(provenance={"val": {"sha256": digest}}))
    assert (bundle / "report.safetensors").exists(), "of the bundle before"
    out, err = measure("--bundle", bundle, "--verbose", "--out", tmp_path / "report")
    warning = "images of mnist are validation images of the model"
    written = [(tmp_path / "report" / name).read_text() for name in ("report.json", "report.md", "report.html")]
    assert all(warning in text for text in (out, err, *written))
    assert "Accuracy: fraction of right answers" in out
