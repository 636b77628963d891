import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors.torch import save_file

from psc_core import open_dataset
from psc_core.cli import evaluate as cli_eval
from psc_core.images.preprocess import PRESETS
from tests import folders
from tests.conftest import TinyJob
from tests.psc_core.cli.support import run
from tools import forge


def test_report_of_a_regression_has_the_sets_of_its_fit(
    angle_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--bundle", str(angle_bundle), "--id", f"rotated-mnist:{data_root}", "--device", "cpu"]
    flags += ["--ood", f"shirts=fashion-mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    code, out, err = run(capsys, cli_eval.main, [*flags, "--out", str(tmp_path)])
    assert code == 0, err
    assert f"report: {tmp_path}/report.html" in out
    page, numbers = (tmp_path / "report.html").read_text(), json.loads((tmp_path / "report.json").read_text())
    assert all(f'<th scope="row">{name}</th>' in page for name in ("validation", "turned", "test", "shirts"))
    assert f"{numbers['images']} images" in page and f"<td>{numbers['errors']['rmse']:.4g}</td>" in page


def test_eval_replaces_a_report_on_request_only(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "report.json").write_text("mine")
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    words += ["--device", "cpu", "--out", str(tmp_path)]
    code, printed, err = run(capsys, cli_eval.main, words)
    assert (code, printed) == (2, "") and "holds report.json already; give --overwrite" in err
    assert [file.name for file in tmp_path.iterdir()] == ["report.json"]
    assert (tmp_path / "report.json").read_text() == "mine"
    assert run(capsys, cli_eval.main, [*words, "--overwrite"])[0] == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(cli_eval.WRITTEN)
    assert json.loads((tmp_path / "report.json").read_text())["images"] == 800


def test_a_report_is_not_written_among_the_images(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    words += ["--ood", f"black={tmp_path}", "--device", "cpu"]
    for out in (tmp_path, tmp_path / "report"):
        code, _, err = run(capsys, cli_eval.main, [*words, "--out", str(out)])
        assert code == 2 and f"--out {out} lies in {tmp_path}" in err
    assert [file.name for file in tmp_path.iterdir()] == ["black.png"]


def test_eval_replaces_no_images_that_are_in_a_folder_called_report(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    words += ["--device", "cpu", "--out", str(tmp_path)]
    (tmp_path / "report").mkdir()
    for name in ("0001.png", "sizes.png"):
        (tmp_path / "report" / name).write_text("mine")
        code, printed, err = run(capsys, cli_eval.main, [*words, "--overwrite"])
        assert (code, printed) == (2, "") and f"{tmp_path / 'report'} holds {name}, of no report in" in err
        assert [file.name for file in tmp_path.rglob("*")] == ["report", name]
        (tmp_path / "report" / name).unlink()
    assert run(capsys, cli_eval.main, [*words, "--overwrite"])[0] == 0
    (tmp_path / "report" / "0001.png").write_text("mine")
    assert run(capsys, cli_eval.main, [*words, "--overwrite"])[0] == 2
    assert (tmp_path / "report" / "0001.png").read_text() == "mine"
    (tmp_path / "report" / "0001.png").rename(tmp_path / "report" / "report.md")  # An evaluation beside the figures.
    cli_eval.check_replaced(tmp_path, cli_eval.WRITTEN, overwrite=True)


@pytest.mark.parametrize(
    "extra", [["--ood", "nameless"], ["--weights", "w"], ["--id", "nowhere"], ["--ood", "a=x", "--ood", "a=y"]]
)
def test_eval_rejects_bad_flags(tiny_bundle: Path, data_root: Path, capsys, extra: list[str]) -> None:  # type: ignore[no-untyped-def]
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    code, _, err = run(capsys, cli_eval.main, [*words, *extra])
    assert code == 2
    assert "expected" in err or "is not a directory" in err


def test_a_target_without_a_table_is_refused(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = write_digits(tmp_path / "known", data_root, "test", 80)
    words = ["--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    code, _, err = run(capsys, cli_eval.main, [*words, "--id", str(known), "--target", "label"])
    assert code == 2 and "no images come from a table, so --target 'label' has no effect" in err
    rows = [f"{file},{file.parent.name},a" for file in known.rglob("*.png")]
    (tmp_path / "known.csv").write_text("\n".join(["file,label,other", *rows]))
    code, out, err = run(capsys, cli_eval.main, [*words, "--id", str(tmp_path / "known.csv"), "--target", "label"])
    assert code == 0 and "80 images" in out, err


def test_images_of_other_classes_are_refused_before_baselines_are_fitted(
    tiny_bundle: Path, data_root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    digits, clothes = f"mnist:{data_root}", f"fashion-mnist:{data_root}"
    words = ["--bundle", str(tiny_bundle), "--id", clothes, "--allow-factories", "tests.tiny:network"]
    words += ["--weights", "none", "--train", digits, "--val", digits, "--device", "cpu"]
    code, _, err = run(capsys, cli_eval.main, words)
    assert code == 2 and "expected the model's 10 classes in fashion-mnist" in err


def write_digits(root: Path, data_root: Path, split: str, images: int) -> Path:
    """Write a folder of digits whose classes are called as those of ``mnist``."""
    folders.write_digits(root, data_root, split, images)
    for digit, name in enumerate(folders.NAMES):
        (root / name).rename(root / str(digit))
    return root


def test_images_that_cannot_be_decoded_are_left_out(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, odd = (write_digits(tmp_path / name, data_root, "test", 80) for name in ("known", "odd"))
    for file in (known / "1" / "bad.png", odd / "bad.png", odd / "worse.png"):
        file.write_bytes(b"text")
    (known / "2" / "copy.png").symlink_to(next((known / "2").glob("[0-9]*.png")))
    (odd / "1.heic").touch()
    words = ["--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    words += ["--id", str(known), "--ood", f"odd={odd}"]
    code, out, err = run(capsys, cli_eval.main, [*words, "--out", str(tmp_path / "out")])
    assert code == 0, err
    assert f"{odd}: not read, by their suffix: 1 .heic" in out
    assert f"left out: {known / '1' / 'bad.png'}: " in out and f"left out: {odd / 'worse.png'}: " in out
    assert f"left out 3 that cannot be decoded: 1 of {known}, 2 of {odd}\n" in out
    assert f"warning: 1 of the 81 images of {known} are repeated" in err
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["images"], report["ood_images"]) == (81, {"odd": 80})
    code, out, err = run(capsys, cli_eval.main, [*words, "--max-bad-images", "2"])
    assert code == 2 and "expected at most 2 images that cannot be decoded" in err and "evaluating" not in err


def test_test_images_among_those_that_should_be_found_are_warned_of(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known = write_digits(tmp_path / "known", data_root, "test", 80)
    words = ["--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    words += ["--id", str(known), "--ood", f"same={known}", "--ood", f"shirts=fashion-mnist:{data_root}"]
    code, out, err = run(capsys, cli_eval.main, [*words, "--out", str(tmp_path / "out")])
    assert code == 0, err
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
    tiny_bundle: Path,
    data_root: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    recorded: dict[str, Any],
    given: str | None,
    noun: str | None,
) -> None:
    images = write_digits(tmp_path / "images", data_root, "val", 150)
    ours = open_dataset(str(images), split="test", preprocess=PRESETS["mnist"]).digest()
    entry = {"sha256": ours}
    provenance = {key: entry if value == "sha256" else [entry] for key, value in recorded.items()}
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    forge.edit(bundle, lambda body: body.update(provenance=provenance))
    words = ["--bundle", str(bundle), "--allow-factories", "tests.tiny:network", "--device", "cpu", "--id", str(images)]
    if given:
        sets = {"--train": f"mnist:{data_root}", "--val": f"mnist:{data_root}", given: str(images)}
        weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
        words += ["--weights", weights, *(word for pair in sets.items() for word in pair)]
    code, _, err = run(capsys, cli_eval.main, words)
    assert code == 0, err
    said = f"warning: 150 of the 150 images of {images} are {noun} images"
    assert (said in err) == (noun is not None) == ("warning" in err)


def test_os_errors_give_one_line(tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    code, printed, err = run(capsys, cli_eval.main, [*words, "--device", "cpu", "--out", str(tmp_path / "file")])
    assert (code, printed) == (2, "")
    assert "file" in err
    assert "Traceback" not in err


def test_baselines_without_provenance(  # type: ignore[no-untyped-def]
    tiny_job, tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    forge.edit(bundle, lambda body: body.update(collapse={"layers": 5}, provenance={"model": 5}, metrics={}))
    data = f"mnist:{data_root}"
    words = ["--bundle", str(bundle), "--id", data, "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    code, out, err = run(capsys, cli_eval.main, [*words, "--weights", weights, "--train", data, "--val", data])
    assert code == 0, err
    assert "temperature" in out and weights in err


def test_other_weights_than_those_of_the_fit_are_refused(
    tiny_job: TinyJob, tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, other = f"mnist:{data_root}", tmp_path / "other.safetensors"
    save_file({name: tensor + 1 for name, tensor in tiny_job.net.state_dict().items()}, other)
    words = ["--bundle", str(tiny_bundle), "--id", data, "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    words += ["--weights", str(other), "--train", data, "--val", data]
    code, _, err = run(capsys, cli_eval.main, words)
    assert code == 2 and str(other) in err


def test_eval_writes_its_report(tiny_job, tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    data, weights = f"dirty-mnist:{data_root}", tiny_job.args[tiny_job.args.index("--weights") + 1]
    words = [
        "--bundle",
        str(tiny_bundle),
        "--id",
        data,
        "--ood",
        f"fashion=fashion-mnist:{data_root}",
        "--device",
        "cpu",
    ]
    words += ["--weights", weights, "--train", data, "--val", data, "--allow-factories", "tests.tiny:network"]
    code, out, err = run(capsys, cli_eval.main, [*words, "--out", str(tmp_path)])
    assert code == 0 and "warning" not in err and "fashion" in out, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images"] == 1100 and "mahalanobis++" in report["separation"]["fashion"]
    assert (tmp_path / "report.md").exists()
    page = (tmp_path / "report.html").read_text()
    assert all(f">{name}</th>" in page for name in ("training", "validation", "turned", "test", "fashion"))
    assert report["warnings"] == [] and "Accuracy: fraction of right" not in out


def test_images_of_the_fit_are_named_wherever_the_report_is_read(
    tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, data = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle")), f"mnist:{data_root}"
    digest = open_dataset(data, split="test", preprocess=PRESETS["mnist"]).digest()
    forge.edit(bundle, lambda body: body.update(provenance={"val": {"sha256": digest}}))
    assert (bundle / "report.safetensors").exists(), "of the bundle before"
    words = ["--bundle", str(bundle), "--id", data, "--allow-factories", "tests.tiny:network", "--verbose"]
    code, out, err = run(capsys, cli_eval.main, [*words, "--device", "cpu", "--out", str(tmp_path / "report")])
    warning = "images of mnist are validation images of the model"
    written = [(tmp_path / "report" / name).read_text() for name in ("report.json", "report.md", "report.html")]
    assert code == 0 and all(warning in text for text in (out, err, *written))
    assert "Accuracy: fraction of right answers" in out
