"""``psc-fit``: its table, and one clear line for every bad input."""

from __future__ import annotations

import argparse
import os
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from psc_core import fit as stages
from psc_core.bundle import read_bundle
from psc_core.cli import evaluate as cli_eval
from psc_core.cli import fit as cli
from psc_core.data import cache
from psc_core.data.dataset import FileSource, ImageDataset
from psc_core.data.open import open_dataset
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.model import load_model
from psc_core.tasks.classification import CONFIDENCE
from tests import tiny
from tests.folders import Job
from tests.psc_core.cli.support import run


def test_fit_prints_table_and_reason(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, cli.main, [*tiny_job.args, "--out", str(tmp_path / "b")])
    assert code == 0
    assert out.index("preprocessing: L, resized to 28 × 28") < out.index("the original network: accuracy 0.")
    assert out.index("original network") < out.index("◀ chosen")
    assert "penultimate" in out
    assert "is all that the penultimate layer is computed from" in out
    assert "projection" in out
    assert not list(tmp_path.glob(".*.stages"))
    said = [
        "the original network     0.",
        "with PSC               0.",
        "out of distribution: OOD score above",
        "report: ",
    ]
    assert sorted(said, key=out.index) == said
    permitted = f"psc-serve --bundle {tmp_path / 'b'} --allow-factories tests.tiny:network"
    assert out.splitlines()[-1] == f"next: {permitted}"
    assert (tmp_path / "b" / "report.html").exists() and (tmp_path / "b" / "README.md").exists()


def test_a_fit_without_a_report_keeps_no_pictures(tiny_job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, cli.main, [*tiny_job.args, "--no-report", "--out", str(tmp_path / "b")])
    assert code == 0 and "OOD score above" in out and "report: " not in out
    assert not list((tmp_path / "b").glob("report*"))
    assert "alarms on images like" in (tmp_path / "b" / "README.md").read_text()


def test_a_bundle_is_replaced_on_request_only(tiny_job, tiny_bundle: Path, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    out = Path(shutil.copytree(tiny_bundle, tmp_path / "b"))
    (out / "report" / "evaluation.md").write_text("mine")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    words = [*tiny_job.args, "--alpha", "0.1", "--no-report", "--out", str(out)]

    code, printed, err = run(capsys, cli.main, words)
    assert code == 2 and "holds a bundle already; give --overwrite" in err and not printed
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert not list(tmp_path.glob(".*.stages"))

    code, _, err = run(capsys, cli.main, [*words, "--overwrite"])
    assert code == 0, err
    assert read_bundle(out).manifest.policy.alpha == 0.1
    assert [file.relative_to(out) for file in out.rglob("*report*")] == [Path("report")]
    assert [file.name for file in (out / "report").iterdir()] == ["evaluation.md"], "pictures of the other fit"
    assert f"version `{read_bundle(out).manifest.version}`" in (out / "README.md").read_text()


def test_a_manifest_alone_is_no_bundle(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "manifest.json").write_text('{"name": "a web application"}')
    code, _, err = run(capsys, cli.main, [*tiny_job.args, "--overwrite", "--out", str(tmp_path / "site")])
    assert code == 2 and "holds other files" in err
    assert (tmp_path / "site" / "manifest.json").read_text() == '{"name": "a web application"}'


def test_a_regression_without_a_report_says_its_error(angle_job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(capsys, cli.main, [*angle_job.args, "--no-report", "--out", str(tmp_path / "b")])
    assert code == 0 and "report: " not in out and not list((tmp_path / "b").glob("report*"))
    rmse = f"{read_bundle(tmp_path / 'b').manifest.metrics['rmse']:.4g}"
    assert f"with PSC  {rmse:>9}" in out and f"| with PSC | {rmse} |" in (tmp_path / "b" / "README.md").read_text()


def test_help_says_with_which_confidence_the_risk_is_kept() -> None:
    assert f"with {100 * CONFIDENCE:g} % confidence" in " ".join(cli.parser().format_help().split())


def test_max_images_are_balanced_and_recorded(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    code, out, _ = run(
        capsys, cli.main, [*tiny_job.args, "--max-images", "300", "--no-report", "--out", str(tmp_path / "b")]
    )
    assert code == 0 and "300 images, 10 classes" in out
    provenance = read_bundle(tmp_path / "b").manifest.provenance
    assert provenance["settings"]["max_images"] == provenance["train"]["images"] == 300


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


def written(data: ImageDataset, root: Path, count: int) -> Path:
    """The first images of each class as files."""
    seen: Counter[int] = Counter()
    for position, label in enumerate(data.first_labels().tolist()):
        file = root / data.classes[label] / f"{seen[label]:04}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        if seen[label] < count:
            Image.fromarray(data.image(position)[0]).save(file)
        seen[label] += 1
    return root


@pytest.fixture
def folder_args(tiny_job, tmp_path: Path, data_root: Path) -> list[str]:  # type: ignore[no-untyped-def]
    """The job with digits in folders."""
    args = [*tiny_job.args, "--layers", "^[24]$", "--alpha", "0.2", "--coverage", "0.8", "--no-report"]
    for split, count in (("train", 12), ("val", 4)):
        data = open_dataset(f"mnist:{data_root}", split=split, preprocess=PRESETS["mnist"])
        args[args.index(f"--{split}") + 1] = str(written(data, tmp_path / split, count))
    return args


@pytest.fixture
def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psc_core.cli.job.load_described", lambda *_, **__: pytest.fail("the network was loaded"))


@pytest.mark.usefixtures("without_network")
@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_folders_that_differ_are_told_before_the_network_is_loaded(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    shutil.rmtree(tmp_path / "val" / "7")
    code, _, err = run(capsys, cli.main, [*folder_args, *more, "--out", str(tmp_path / "b")])
    assert code == 2 and f"classes in {tmp_path / 'val'}, got 9 (missing: 7); use" in err


def table_of(root: Path, without: str = "") -> str:
    """A table of the images in class folders, as Kaggle gives it, with one column more."""
    files = [file for file in sorted(root.rglob("*.png")) if file.parent.name != without]
    lines = [f"{file.relative_to(root)},{file.parent.name},{index}" for index, file in enumerate(files)]
    table = root / "labels.csv"
    table.write_text("\n".join(["id,label,row", *lines]))
    return str(table)


def test_tables_of_classes_are_fitted_and_evaluated(folder_args: list[str], tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    """Validation and test images may lack a class: no row of a table can name one without images."""
    args, bundle = [*folder_args, "--target", "label"], str(tmp_path / "b")
    args[args.index("--train") + 1] = table_of(tmp_path / "train")
    args[args.index("--val") + 1] = val = table_of(tmp_path / "val", without="7")
    code, _, err = run(capsys, cli.main, [*args, "--out", bundle])
    assert code == 2 and "labels.csv has numbers of label, which a classifier does not predict; " in err
    assert "class indices that are opened with --task classification" in err
    code, out, err = run(capsys, cli.main, [*args, "--task", "classification", "--out", bundle])
    assert code == 0 and "120 images, 10 classes" in out, err
    assert read_bundle(tmp_path / "b").manifest.classes == tuple("0123456789")

    words = ["--bundle", bundle, "--device", "cpu", "--allow-factories", "tests.tiny:network"]
    words += ["--ood", f"same={val}", "--id", val]
    code, _, err = run(capsys, cli_eval.main, words)
    assert code == 2 and "has the columns label, row beside that of the files, 'id'; choose one with --target" in err
    code, out, err = run(capsys, cli_eval.main, [*words, "--target", "label"])
    assert code == 0 and "labels.csv: 36 images" in out and "same" in out, err


def test_an_output_of_the_wrong_form_is_told_before_any_image_is_decoded(
    folder_args: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageDataset, "image", lambda *_: pytest.fail("an image was decoded"))
    args = [*folder_args, "--size", "5", "--model-arg", "in_channels=1", "--out", str(tmp_path / "b")]
    args[args.index("--model") + 1] = f"{__name__}:squeezed"
    code, _, err = run(capsys, cli.main, args)
    assert (
        code == 2
        and f"expected {__name__}:squeezed to return a tensor of shape (1, 10) for one image, got (10,)" in err
    )


def squeezed(num_classes: int, in_channels: int) -> torch.nn.Module:
    """A network that loses the batch axis of a single image."""
    net = tiny.network(num_classes, in_channels)
    net.register_forward_hook(lambda _module, _args, output: output.squeeze())
    return net


def test_few_images_that_cannot_be_decoded_are_skipped(  # type: ignore[no-untyped-def]
    folder_args: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [
        tmp_path / "train" / "3" / "0002.png",
        tmp_path / "val" / "5" / "0000.png",
        tmp_path / "val" / "5" / "0001.png",
    ]
    for file in bad:
        file.write_bytes(file.read_bytes()[:40])
    bad[-1].unlink()
    bad[-1].symlink_to("nowhere.png")
    (tmp_path / "val" / "5" / "0002.HEIC").touch()
    (tmp_path / "train" / "loose.jpg").touch()
    out, said = tmp_path / "b", "left out 3 that cannot be decoded: 1 of"
    code, printed, err = run(capsys, cli.main, [*folder_args, "--max-bad-images", "2", "--out", str(out)])
    assert code == 2 and "expected at most 2 images that cannot be decoded, found more: " in err and str(bad[0]) in err
    assert "--max-bad-images" in err and said not in printed
    code, printed, err = run(capsys, cli.main, [*folder_args, "--max-bad-images", "0", "--out", str(out)])
    assert code == 2 and "damaged or truncated" in err

    code, printed, err = run(capsys, cli.main, [*folder_args, "--dry-run", "--out", str(out)])
    assert code == 0 and said in printed, err
    assert f"{tmp_path / 'train'}: not read, beside the class folders: 1 .jpg; move" in printed
    assert f"{tmp_path / 'val'}: not read, by their suffix: 1 .heic; convert" in printed

    with monkeypatch.context() as patch:
        patch.setattr(stages, "fit_model", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(capsys, cli.main, [*folder_args, "--out", str(out)])[0] == 130
    with monkeypatch.context() as patch:
        patch.setattr(stages, "collapse", lambda *_: pytest.fail("the stage was kept"))
        code, printed, err = run(capsys, cli.main, [*folder_args, "--out", str(out)])
    assert code == 0 and said in printed, err
    assert all(f"left out: {file}" in printed for file in bad[:-1])
    assert f"left out: cannot read the image {bad[-1]}: No such file or directory; " in printed
    provenance = read_bundle(out).manifest.provenance
    assert [provenance[split][key] for split in ("train", "val") for key in ("images", "skipped")] == [119, 1, 38, 2]

    for file in bad:
        file.unlink()
    assert run(capsys, cli.main, [*folder_args, "--cache", "off", "--out", str(tmp_path / "b2")])[0] == 0
    other = read_bundle(tmp_path / "b2")
    assert other.parts.keys() == read_bundle(out).parts.keys()
    for part, tensors in read_bundle(out).parts.items():
        assert all(torch.equal(tensor, other.parts[part][key]) for key, tensor in tensors.items()), part


def test_a_fit_that_keeps_no_images_says_so(  # type: ignore[no-untyped-def]
    folder_args: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "collapse", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    args, said = [*folder_args, "--out", str(tmp_path / "b")], "no room on the disk for 1 MiB of decoded images, so "
    assert said not in run(capsys, cli.main, args)[1]
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert said in run(capsys, cli.main, args)[1]
    assert said not in run(capsys, cli.main, [*args, "--cache", "off"])[1]


def test_a_fit_of_images_that_were_edited_since_begins_again(  # type: ignore[no-untyped-def]
    folder_args: list[str], tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[bool] = []
    collapse = stages.collapse
    monkeypatch.setattr(stages, "collapse", lambda *args: measured.append(True) or collapse(*args))
    monkeypatch.setattr(stages, "project", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    for _ in range(2):
        assert run(capsys, cli.main, [*folder_args, "--out", str(tmp_path / "b")])[0] == 130
        assert len(measured) == 1
    os.utime(tmp_path / "train" / "7" / "0003.png", ns=(0, 1))  # As an edited bitmap, which keeps its size.
    assert run(capsys, cli.main, [*folder_args, "--out", str(tmp_path / "b")])[0] == 130
    assert len(measured) == 2


def test_each_image_is_decoded_once(folder_args: list[str], tmp_path: Path, capsys, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    reads = Counter[str]()
    decode = FileSource.read

    def counted(source: FileSource, index: int, preprocess: Preprocess) -> Any:
        reads[str(source.path(index))] += 1
        return decode(source, index, preprocess)

    monkeypatch.setattr(FileSource, "read", counted)
    assert run(capsys, cli.main, [*folder_args, "--out", str(tmp_path / "b")])[0] == 0
    assert len(reads) == 160 and set(reads.values()) == {1}


def test_says_how_weights_were_found(tiny_job, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    state = {f"module.{name}": tensor for name, tensor in tiny_job.net.state_dict().items()}
    torch.save({"state_dict": state, "args": argparse.Namespace(lr=0.1)}, tmp_path / "best.pth.tar")
    args = [*tiny_job.args, "--dry-run", "--out", str(tmp_path / "b")]
    args[args.index("--weights") + 1] = str(tmp_path / "best.pth.tar")
    code, out, err = run(capsys, cli.main, args)
    assert code == 0, err
    assert 'network: found under "state_dict" of best.pth.tar; removed the prefix "module."\n' in out


def words_of(job: Job, **flags: str) -> list[str]:
    given = {"model": f"hf:{job.model}", "train": str(job.train), "val": str(job.val), **flags}
    return ["--no-report", *(word for flag, value in given.items() for word in (f"--{flag}", value))]


def test_weights_are_required_where_no_folder_has_them(tiny_job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    words = [*tiny_job.args, "--out", str(tmp_path / "b")]
    at = words.index("--weights")
    code, _, err = run(capsys, cli.main, [*words[:at], *words[at + 2 :]])
    assert code == 2
    assert "expected --weights FILE, the trained weights of tests.tiny:network, which has none with it" in err


def test_a_network_that_is_not_there_is_told_before_data_is_opened(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    words = ["--model", "hf:acme/nowhere", "--train", "nowhere", "--val", "nowhere", "--out", str(tmp_path / "b")]
    code, _, err = run(capsys, cli.main, words)
    assert code == 2 and "give --allow-download to get it from the hub" in err


def test_odd_classes_are_named_before_anything_is_run(hf_job: Job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    train = Path(shutil.copytree(hf_job.train, tmp_path / "train"))
    shutil.rmtree(train / "nine")
    code, out, err = run(capsys, cli.main, [*words_of(hf_job, train=str(train)), "--out", str(tmp_path / "b")])
    assert code == 2 and out == "" and "10 classes in" in err and "got 9 (missing: nine)" in err


def test_an_order_that_is_assumed_is_told(hf_job: Job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    folders = {name: Path(shutil.copytree(getattr(hf_job, name), tmp_path / name)) for name in ("train", "val")}
    for root in folders.values():
        for folder in [*root.iterdir()]:
            folder.rename(root / f"n{folder.name}")
    flags = {name: str(root) for name, root in folders.items()}
    _, out, _ = run(capsys, cli.main, [*words_of(hf_job, **flags), "--layer", "none", "--out", str(tmp_path / "b")])
    assert "no class of" in out and "their order is taken to be that of its outputs" in out


def test_a_preprocessing_that_psc_cannot_do(hf_job: Job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    model = Path(shutil.copytree(hf_job.model, tmp_path / "net"))
    (model / "preprocessor_config.json").unlink()
    words = [*words_of(hf_job, model=f"hf:{model}"), "--out", str(tmp_path / "b")]
    code, _, err = run(capsys, cli.main, words)
    assert code == 2 and "has no preprocessor_config.json; say how images are prepared by --preset or --pre" in err
    _, out, _ = run(capsys, cli.main, [*words, "--preset", "cifar10", "--layer", "none"])
    assert "preprocessing: RGB, resized to 32 × 32 pixels" in out


def test_a_size_that_the_network_cannot_read(hf_job: Job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    code, out, err = run(capsys, cli.main, [*words_of(hf_job, size="64"), "--out", str(tmp_path / "b")])
    assert code == 2 and out == ""
    assert "cannot run an input of shape (1, 3, 64, 64)" in err and "check the preset, the image size" in err


def test_a_graph_needs_no_permission(tiny_job, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    words = [*tiny_job.args, "--graph", "--no-report", "--layers", "^[24]$", "--out", str(tmp_path / "b")]
    code, out, err = run(capsys, cli.main, words)
    assert code == 0, err
    assert "allow-factories" not in out
    manifest = read_bundle(tmp_path / "b").manifest
    assert manifest.backbone.network is None and manifest.provenance["model"] == "tests.tiny:network"
    assert load_model(tmp_path / "b").backbone.onnx is not None
