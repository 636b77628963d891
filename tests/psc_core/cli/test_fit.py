import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from PIL import Image

from psc_core import fit as stages
from psc_core.bundle import read_bundle
from psc_core.cli import evaluate as cli_eval
from psc_core.cli import fit as cli
from psc_core.data.dataset import ImageDataset
from psc_core.model import load_model
from tests.conftest import Run, TinyJob
from tests.opened import opened


def test_a_bundle_is_replaced_on_request_only(tiny_job: TinyJob, tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    out = Path(shutil.copytree(tiny_bundle, tmp_path / "b"))
    (out / "report" / "evaluation.md").write_text("mine")
    before = {file: file.read_bytes() for file in out.rglob("*") if file.is_file()}
    words = [*tiny_job.args, "--alpha", "0.1", "--no-report", "--out", str(out)]

    printed, err = run(cli.main, *words, code=2)
    assert "holds a bundle already; give --overwrite" in err and not printed
    assert {file: file.read_bytes() for file in out.rglob("*") if file.is_file()} == before
    assert not list(tmp_path.glob(".*.stages"))

    run(cli.main, *words, "--overwrite")
    assert read_bundle(out).manifest.policy.alpha == 0.1
    assert [file.relative_to(out) for file in out.rglob("*report*")] == [Path("report")]
    assert [file.name for file in (out / "report").iterdir()] == ["evaluation.md"], "pictures of the other fit"
    assert f"version `{read_bundle(out).manifest.version}`" in (out / "README.md").read_text()


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
def folder_args(tiny_job: TinyJob, tmp_path: Path) -> list[str]:  # type: ignore[no-untyped-def]
    """The job with digits in folders."""
    args = [*tiny_job.args, "--layers", "^[24]$", "--alpha", "0.2", "--coverage", "0.8", "--no-report"]
    for split, count in (("train", 12), ("val", 4)):
        data = opened("mnist", split)
        args[args.index(f"--{split}") + 1] = str(written(data, tmp_path / split, count))
    return args


def table_of(root: Path, without: str = "") -> str:
    """A table of the images in class folders, as Kaggle gives it, with one column more."""
    files = [file for file in sorted(root.rglob("*.png")) if file.parent.name != without]
    lines = [f"{file.relative_to(root)},{file.parent.name},{index}" for index, file in enumerate(files)]
    table = root / "labels.csv"
    table.write_text("\n".join(["id,label,row", *lines]))
    return str(table)


def test_tables_of_classes_are_fitted_and_evaluated(folder_args: list[str], tmp_path: Path, run: Run) -> None:
    """Validation and test images may lack a class: no row of a table can name one without images."""
    args, bundle = [*folder_args, "--target", "label"], str(tmp_path / "b")
    args[args.index("--train") + 1] = table_of(tmp_path / "train")
    args[args.index("--val") + 1] = val = table_of(tmp_path / "val", without="7")
    _, err = run(cli.main, *args, "--out", bundle, code=2)
    assert "labels.csv has numbers of label, which a classifier does not predict; " in err
    assert "class indices that are opened with --task classification" in err
    assert "120 images, 10 classes" in run(cli.main, *args, "--task", "classification", "--out", bundle)[0]
    assert read_bundle(tmp_path / "b").manifest.classes == tuple("0123456789")

    words = ["--bundle", bundle, "--device", "cpu", "--allow-factories", "tests.tiny:network"]
    words += ["--ood", f"same={val}", "--id", val]
    _, err = run(cli_eval.main, *words, code=2)
    assert "has the columns label, row beside that of the files, 'id'; choose one with --target" in err
    out, _ = run(cli_eval.main, *words, "--target", "label")
    assert "labels.csv: 36 images" in out and "same" in out


@pytest.mark.thorough
def test_few_images_that_cannot_be_decoded_are_skipped(
    folder_args: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [tmp_path / name for name in ("train/3/0002.png", "val/5/0000.png", "val/5/0001.png")]
    for file in bad:
        file.write_bytes(file.read_bytes()[:40])
    bad[-1].unlink()
    bad[-1].symlink_to("nowhere.png")
    (tmp_path / "val" / "5" / "0002.HEIC").touch()
    (tmp_path / "train" / "loose.jpg").touch()
    out, said = tmp_path / "b", "left out 3 that cannot be decoded: 1 of"
    printed, err = run(cli.main, *folder_args, "--max-bad-images", "2", "--out", out, code=2)
    assert str(bad[0]) in err and "--max-bad-images" in err and said not in printed

    printed, _ = run(cli.main, *folder_args, "--dry-run", "--out", out)
    assert "just run it" in printed and "1 .jpg" in printed and "1 .heic" in printed
    assert said in printed and all(str(file) in printed for file in bad)

    with monkeypatch.context() as patch:
        patch.setattr(stages, "fit_model", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        run(cli.main, *folder_args, "--out", out, code=130)
    with monkeypatch.context() as patch:
        patch.setattr(stages, "collapse", lambda *_: pytest.fail("the stage was kept"))
        printed, _ = run(cli.main, *folder_args, "--out", out)
        assert said in printed
    assert all(str(file) in printed for file in bad)
    provenance = read_bundle(out).manifest.provenance
    assert [provenance[split][key] for split in ("train", "val") for key in ("images", "skipped")] == [119, 1, 38, 2]

    at = sorted((tmp_path / "train").glob("*/*.png")).index(bad[0])  # Behind it all move up by one once it is gone.
    for file in bad:
        file.unlink()
    run(cli.main, *folder_args, "--cache", "off", "--out", tmp_path / "b2")
    other = read_bundle(tmp_path / "b2")
    assert other.parts.keys() == read_bundle(out).parts.keys()
    given = other.parts["stored_images"]["images"]
    given += given >= at
    for part, tensors in read_bundle(out).parts.items():
        assert all(torch.equal(tensor, other.parts[part][key]) for key, tensor in tensors.items()), part


def test_weights_are_required_where_no_folder_has_them(tiny_job: TinyJob, tmp_path: Path, run: Run) -> None:
    words = [*tiny_job.args, "--out", str(tmp_path / "b")]
    at = words.index("--weights")
    _, err = run(cli.main, *words[:at], *words[at + 2 :], code=2)
    assert "expected --weights FILE, the trained weights of tests.tiny:network, which has none with it" in err


def test_a_network_that_is_not_there_is_told_before_data_is_opened(tmp_path: Path, run: Run) -> None:
    words = ["--model", "hf:acme/nowhere", "--train", "nowhere", "--val", "nowhere", "--out", str(tmp_path / "b")]
    assert "give --allow-download to get it from the hub" in run(cli.main, *words, code=2)[1]


@pytest.mark.thorough
def test_a_graph_needs_no_permission(tiny_job: TinyJob, tmp_path: Path, run: Run) -> None:
    words = [*tiny_job.args, "--graph", "--no-report", "--layers", "^[24]$", "--out", str(tmp_path / "b")]
    out, _ = run(cli.main, *words)
    assert "allow-factories" not in out
    manifest = read_bundle(tmp_path / "b").manifest
    assert manifest.backbone.network is None and manifest.provenance["model"] == "tests.tiny:network"
    assert load_model(tmp_path / "b").backbone.onnx is not None


def test_prints_what_it_chose_and_how_it_is_served(tiny_job: TinyJob, tmp_path: Path, run: Run) -> None:
    words = [*tiny_job.args, "--max-images", "300", "--no-report", "--out", str(tmp_path / "b")]
    out, _ = run(cli.main, *words)
    assert "300 images, 10 classes" in out and "◀ chosen" not in out and len(out.splitlines()) <= 15
    assert "accuracy" in out and "with PSC" in out
    permitted = f"psc-serve --bundle {tmp_path / 'b'} --allow-factories tests.tiny:network"
    assert out.splitlines()[-1] == f"next: {permitted}"
    assert (tmp_path / "b" / "README.md").exists()
    assert not list((tmp_path / "b").glob("report*")) and not list(tmp_path.glob(".*.stages"))
    provenance = read_bundle(tmp_path / "b").manifest.provenance
    assert provenance["settings"]["max_images"] == provenance["train"]["images"] == 300


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--train", "nowhere", "not a directory"),
        ("--weights", "nowhere.safetensors", "nowhere.safetensors"),
        ("--model", "resnet18", "resnet18"),
        ("--layer", "layer9", "layer9"),
        ("--layers", "(", "("),
        ("--alpha", "1e-9", "alpha"),
        ("--c-proj", "9999", "c_proj"),
        ("--pca", "9999", "9999"),
        ("--device", "tpu", "tpu"),
        ("--model-arg", "novalue", "key=value"),
        ("--coverage", "0.9999", "coverage"),
        ("--name", "n" * 201, "200 characters"),
        ("--name", "\udce9", "UTF-8"),
        ("--layers", "2|\udce9", "UTF-8"),
        ("--model-arg", "name=\udce9", "UTF-8"),
        ("--size", "2100", "input pixels"),
        ("--model-arg", "in_channels=123456", "65536"),
        ("--out", "file", "it is a file"),
        ("--out", "file/bundle", "cannot write to"),
        ("--out", "other", "holds other files"),
    ],
)
def test_bad_flags_give_one_line(
    tiny_job: TinyJob, tmp_path: Path, run: Run, flag: str, value: str, message: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "manifest.json").write_text('{"name": "a web application"}')
    value = str(tmp_path / value) if flag == "--out" else value
    _, err = run(cli.main, *tiny_job.args, "--out", tmp_path / "b", flag, value, code=2)
    assert message in err and "Traceback" not in err
    assert {each.name for each in tmp_path.glob("[!.]*")} == {"file", "other"}, "a checkpoint may stay, hidden"


@pytest.mark.parametrize("layer", ["8", "layer9"])  # 8 gives the output.
def test_a_layer_that_is_none_is_told_before_a_pass(tiny_job: TinyJob, tmp_path: Path, run: Run, layer: str) -> None:
    out, err = run(cli.main, *tiny_job.args, "--out", tmp_path / "b", "--layer", layer, code=2)
    assert out == "" and f"before the output, got '{layer}'" in err


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_folders_that_differ_are_told_before_the_network_is_loaded(
    folder_args: list[str], tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch, more: list[str]
) -> None:
    monkeypatch.setattr("psc_core.cli.job.load_described", lambda *_, **__: pytest.fail("the network was loaded"))
    shutil.rmtree(tmp_path / "val" / "7")
    assert "got 9 (missing: 7)" in run(cli.main, *folder_args, *more, "--out", tmp_path / "b", code=2)[1]
