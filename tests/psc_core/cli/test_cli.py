"""The command lines: complete help, one clear line for every bad input, exit codes 0, 1 and 2."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from psc_core import open_dataset
from psc_core.cli import evaluate as cli_eval
from psc_core.cli import fit as cli
from psc_core.cli.provenance import check_disjoint, provenance_of
from psc_core.data.spec import image_folder
from psc_core.images.preprocess import PRESETS
from tests.attacks import forge


def run(capsys: pytest.CaptureFixture[str], main, args: list[str]) -> tuple[int, str, str]:  # type: ignore[no-untyped-def]
    try:
        code = main(args)
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize(
    ("main", "words"),
    [
        (
            cli.main,
            ["--model", "--weights", "--layer", "--epsilon", "--head", "--density", "--alpha", "--seed", "--out"],
        ),
        (cli_eval.main, ["--bundle", "--id", "--ood", "--out", "--weights"]),
    ],
)
def test_help_is_complete(capsys: pytest.CaptureFixture[str], main, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, main, ["--help"])
    assert code == 0
    for word in (*words, "130 interrupted"):
        assert word in out


def test_fit_prints_table_and_reason(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, cli.main, [*tiny_job.args, "--out", str(tmp_path / "b")])
    assert code == 0
    assert "◀ candidate" in out
    assert "penultimate" in out
    assert "has the highest NC4" in out
    assert "projection" in out
    assert not list(tmp_path.glob(".*.stages"))


def damaged(tiny_job, tmp_path: Path, change) -> list[str]:  # type: ignore[no-untyped-def]
    """The job's arguments with changed weights."""
    tensors = load_file(tiny_job.args[tiny_job.args.index("--weights") + 1])
    change(tensors)
    save_file(tensors, tmp_path / "w.safetensors")
    args = list(tiny_job.args)
    args[args.index("--weights") + 1] = str(tmp_path / "w.safetensors")
    return args


def drop_key(tensors) -> None:  # type: ignore[no-untyped-def]
    del tensors["2.weight"]


def other_classes(tensors) -> None:  # type: ignore[no-untyped-def]
    tensors["8.weight"], tensors["8.bias"] = tensors["8.weight"][:7].clone(), tensors["8.bias"][:7].clone()


@pytest.mark.parametrize(("change", "message"), [(drop_key, "2.weight"), (other_classes, "7")])
def test_rejects_other_weights(tiny_job, tmp_path: Path, capsys, change, message: str) -> None:  # type: ignore[no-untyped-def]
    args = damaged(tiny_job, tmp_path, change)
    code, _, err = run(capsys, cli.main, [*args, "--out", str(tmp_path / "b")])
    assert code == 2
    assert message in err
    assert err.strip().count("\n") == 0
    assert "Traceback" not in err
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--train", "nowhere", "not a directory"),
        ("--weights", "nowhere.safetensors", "nowhere.safetensors"),
        ("--model", "torchvision:resnet19", "resnet19"),
        ("--model", "resnet18", "resnet18"),
        ("--layer", "layer9", "layer9"),
        ("--layers", "nothing", "nothing"),
        ("--layers", "(", "("),
        ("--epsilon", "3", "epsilon"),
        ("--alpha", "1e-9", "alpha"),
        ("--alpha", "2", "between 0 and 1"),
        ("--c-proj", "9999", "c_proj"),
        ("--pca", "9999", "9999"),
        ("--device", "tpu", "tpu"),
        ("--model-arg", "novalue", "key=value"),
        ("--coverage", "0.9999", "coverage"),
        ("--batch-images", "0", "positive integer"),
        ("--size", "-3", "positive integer"),
        ("--name", "n" * 201, "200 characters"),
        ("--name", "\udce9", "UTF-8"),
        ("--layers", "2|\udce9", "UTF-8"),
        ("--model-arg", "name=\udce9", "UTF-8"),
        ("--max-memory", "lots", "512M"),
        ("--seed", str(1 << 64), "2**63"),
        ("--size", "2100", "input pixels"),
        ("--model-arg", "in_channels=123456", "65536"),
    ],
)
def test_bad_flags_give_one_line(  # type: ignore[no-untyped-def]
    tiny_job, tmp_path: Path, capsys, flag: str, value: str, message: str
) -> None:
    code, _, err = run(capsys, cli.main, [*tiny_job.args, "--out", str(tmp_path / "b"), flag, value])
    assert code == 2
    assert message in err
    assert "Traceback" not in err
    assert not (tmp_path / "b").exists()


def test_eval_writes_its_report(tiny_job, tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    data = f"dirty-mnist:{data_root}"
    code, out, err = run(
        capsys,
        cli_eval.main,
        [
            "--bundle",
            str(tiny_bundle),
            "--id",
            data,
            "--ood",
            f"fashion=fashion-mnist:{data_root}",
            "--weights",
            weights,
            "--train",
            data,
            "--val",
            data,
            "--device",
            "cpu",
            "--allow-factories",
            "tests.tiny:network",
            "--out",
            str(tmp_path),
        ],
    )
    assert code == 0, err
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["images"] == 1100
    assert "mahalanobis++" in report["separation"]["fashion"]
    assert "fashion" in out
    assert (tmp_path / "report.md").read_text().startswith("#")


@pytest.mark.parametrize(
    "extra", [["--ood", "nameless"], ["--weights", "w"], ["--id", "nowhere"], ["--ood", "a=x", "--ood", "a=y"]]
)
def test_eval_rejects_bad_flags(tiny_bundle: Path, data_root: Path, capsys, extra: list[str]) -> None:  # type: ignore[no-untyped-def]
    code, _, err = run(
        capsys,
        cli_eval.main,
        ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network", *extra],
    )
    assert code == 2
    assert "expected" in err or "is not a directory" in err


def test_checks_the_output_first(  # type: ignore[no-untyped-def]
    tiny_job, tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("years of work")
    (tmp_path / "mounted").mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    for out, message in (
        ("file", "it is a file"),
        ("file/bundle", "cannot write to"),
        ("other", "holds other files"),
        ("mounted", "choose a folder inside it"),
    ):
        code, printed, err = run(capsys, cli.main, [*tiny_job.args, "--out", str(tmp_path / out)])
        assert code == 2
        assert message in err
        assert "layer" not in printed
    assert (tmp_path / "other" / "thesis.txt").read_text() == "years of work"


def test_baselines_need_the_same_classes(tiny_job, tiny_bundle: Path, data_root: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    digits, clothes = f"mnist:{data_root}", f"fashion-mnist:{data_root}"
    words = ["--bundle", str(tiny_bundle), "--id", digits, "--allow-factories", "tests.tiny:network"]
    code, _, err = run(
        capsys, cli_eval.main, [*words, "--weights", weights, "--train", clothes, "--val", clothes, "--device", "cpu"]
    )
    assert code == 2
    assert "expected the model's 10 classes in fashion-mnist, got 10 (missing: " in err


def test_os_errors_give_one_line(tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "file").write_text("")
    words = ["--bundle", str(tiny_bundle), "--id", f"mnist:{data_root}", "--allow-factories", "tests.tiny:network"]
    code, printed, err = run(capsys, cli_eval.main, [*words, "--device", "cpu", "--out", str(tmp_path / "file")])
    assert (code, printed) == (2, "")
    assert "file" in err
    assert "Traceback" not in err


def test_rejects_training_images_as_validation(tiny_job, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    same = f"mnist:{data_root}#train"
    args = [*tiny_job.args, "--train", same, "--val", same, "--out", str(tmp_path / "b")]
    code, printed, err = run(capsys, cli.main, args)
    assert code == 2
    assert "the same images as --train" in err
    assert "layer" not in printed


def write_bitmaps(root: Path, shade: int) -> Path:
    """Files of one size, whatever they show."""
    for name in "ab":
        (root / name).mkdir(parents=True)
        for i in range(2):
            Image.fromarray(np.full((28, 28), shade + i, np.uint8)).save(root / name / f"{i}.bmp")
    return root


def test_accepts_other_images_of_equal_names_and_sizes(tiny_job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    args = cli.parser().parse_args([*tiny_job.args, "--out", str(tmp_path / "b")])
    train, val = (image_folder(write_bitmaps(tmp_path / str(n), n), PRESETS["mnist"]) for n in (10, 20))
    provenance = provenance_of(args, train, val)
    assert provenance["train"]["sha256"] == provenance["val"]["sha256"]
    check_disjoint(train, val, provenance)


def test_undecodable_folder_name(tiny_job, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    args = cli.parser().parse_args([*tiny_job.args, "--out", str(tmp_path / "b")])
    data = image_folder(write_bitmaps(tmp_path / os.fsdecode(b"caf\xe9"), 0), PRESETS["mnist"])
    assert provenance_of(args, data, data)["train"]["name"] == "caf\N{REPLACEMENT CHARACTER}"


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
    assert "temperature" in out


def test_eval_without_images_of_a_class(tiny_bundle: Path, data_root: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    digits = open_dataset(f"mnist:{data_root}", split="test", preprocess=PRESETS["mnist"])
    for name in digits.classes:
        (tmp_path / "test" / name).mkdir(parents=True)
    kept = torch.nonzero(digits.first_labels() != 7)[:30, 0].tolist()
    for index in kept:
        pixels, label = digits.image(index)[0], int(digits.first_labels()[index])
        Image.fromarray(pixels).save(tmp_path / "test" / str(label) / f"{index}.png")
    words = ["--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network", "--device", "cpu"]
    code, _, err = run(
        capsys, cli_eval.main, [*words, "--id", str(tmp_path / "test"), "--out", str(tmp_path / "report")]
    )
    assert code == 0, err
    assert json.loads((tmp_path / "report" / "report.json").read_text())["images"] == 30
