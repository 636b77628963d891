import csv
import hashlib
import json
import shutil
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from psc_core.bundle import read_bundle
from psc_core.cli import log as cli
from psc_core.data.dataset import ImageDataset
from psc_core.log.labels import Label, read_answers, read_labels, write_labels
from psc_core.log.sample import read_unknown
from psc_core.model import FittedModel
from tests.conftest import ROOT, Run
from tests.logged import NOW, Logged, labelled, plain, png, write_log
from tests.opened import loaded, opened


def test_writes_a_new_version_beside_the_old_one(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    write_log(tmp_path / "log", labelled(opened("mnist"), 60))
    bundle = shutil.copytree(tiny_bundle, tmp_path / "old")
    (bundle / "examples").mkdir()
    (bundle / "examples" / "three.png").write_bytes(b"an image to try")
    words = ["--bundle", str(bundle), "--log", str(tmp_path / "log"), "--allow-factories", "tests.tiny:network"]
    out, before = tmp_path / "new", json.loads((bundle / "manifest.json").read_text())
    text, _ = run(cli.recalibrate_main, *words, "--risk", "auto", "--alpha", "0.1", "--out", out)
    manifest = read_bundle(out).manifest
    assert f"wrote {out} (version {manifest.version}, from {before['version']})" in text
    assert "60 reviewed: 60 of a class" in text and "next: psc-serve --bundle" in text
    assert manifest.policy.alpha == 0.1
    card = (out / "README.md").read_text()
    assert "Calibration images: 60 labelled images of a service's random sample, 2026-11-20 to 2026-11-20." in card
    assert "like the validation images" not in card
    assert (out / "examples" / "three.png").read_bytes() == b"an image to try"
    assert json.loads((bundle / "manifest.json").read_text()) == before
    for part in ("backbone", "projection", "density", "head"):
        assert (out / f"{part}.safetensors").read_bytes() == (bundle / f"{part}.safetensors").read_bytes()
    _, err = run(cli.recalibrate_main, *words, "--out", out, code=2)
    assert "holds a bundle already; give --overwrite" in err
    run(cli.recalibrate_main, *words, "--out", out, "--overwrite")
    _, err = run(cli.recalibrate_main, *words, "--out", bundle, "--overwrite", code=2)
    assert "the old version stays" in err
    _, err = run(cli.recalibrate_main, *words, "--alpha", "0.001", "--out", tmp_path / "x", code=2)
    assert "at least 999 images" in err and not (tmp_path / "x").exists()


def test_a_place_that_is_none_is_found_before_any_image_is_read(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    (tmp_path / "file").write_text("mine")
    words = ["--bundle", str(tiny_bundle), "--log", str(tmp_path / "no log"), "--out", str(tmp_path / "file")]
    assert "it is a file; choose another place" in run(cli.recalibrate_main, *words, code=2)[1]


def test_the_width_of_a_regression_changes(angle_bundle: Path, tmp_path: Path, run: Run) -> None:
    write_log(tmp_path / "log", labelled(opened("rotated-mnist"), 60))
    words = ["--bundle", str(angle_bundle), "--log", str(tmp_path / "log"), "--allow-factories", "tests.tiny:network"]
    run(cli.recalibrate_main, *words, "--max-width", "12.5", "--out", tmp_path / "new")
    policies = [read_bundle(folder).manifest.policy.model_dump() for folder in (angle_bundle, tmp_path / "new")]
    assert policies[1] == {**policies[0], "max_width": 12.5}
    _, err = run(cli.recalibrate_main, *words, "--risk", "0.1", "--out", tmp_path / "x", code=2)
    assert "calibration of a regression does not read risk" in err


def test_a_day_is_a_day(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.recalibrate_main(["--bundle", "bundle", "--log", "log", "--since", "yesterday"])
    assert "expected a day as YYYY-MM-DD, got 'yesterday'" in capsys.readouterr().err


def test_extends_the_density(tiny_bundle: Path, tmp_path: Path, run: Run) -> None:
    write_log(tmp_path / "log", labelled(opened("mnist"), 180, sampled=120))
    words = ["--bundle", str(tiny_bundle), "--allow-factories", "tests.tiny:network", "--extend-density"]
    assert "◀ chosen" in run(cli.recalibrate_main, *words, "--log", tmp_path / "log", "--out", tmp_path / "new")[0]
    before, after = (read_bundle(folder).manifest.files for folder in (tiny_bundle, tmp_path / "new"))
    assert {name for name in before if before[name] == after[name]} >= {"backbone.safetensors", "head.safetensors"}
    assert before["density.safetensors"] != after["density.safetensors"]
    assert "60 labelled images outside the random sample" in (tmp_path / "new" / "README.md").read_text()


def test_what_nobody_named_comes_in_clusters(tmp_path: Path, run: Run) -> None:
    clothes = opened("fashion-mnist")
    kinds = clothes.first_labels().tolist()
    of = {label: [i for i, kind in enumerate(kinds) if kind == label][:20] for label in (1, 9)}  # trousers and boots
    images = [Logged(png(clothes.image(i)[0]), "none_of_the_classes") for i in (*of[1][:16], *of[9])]
    images += [Logged(png(clothes.image(i)[0]), "none_of_the_classes", "trouser") for i in of[1][16:]]
    write_log(tmp_path / "log", images)
    bundle, file = str(ROOT / "artifacts" / "dirty-mnist-resnet18"), tmp_path / "to-name.csv"
    words = ["review", str(tmp_path / "log"), "--clusters", bundle]
    assert "36 images in 2 clusters: 20, 16" in run(cli.main, *words, "--csv", file)[0]
    lines = list(csv.DictReader(file.read_text().splitlines()))
    boots = {hashlib.sha256(png(clothes.image(i)[0])).hexdigest() for i in of[9]}
    assert {line["image_sha256"] for line in lines if line["label"] == "none_of_the_classes:cluster 1"} == boots
    assert (tmp_path / "log") in Path(lines[0]["image"]).parents and Path(lines[0]["image"]).is_file()
    answers = [answer.text for answer in read_answers(file)]
    assert answers == ["none_of_the_classes:cluster 1"] * 20 + ["none_of_the_classes:cluster 2"] * 16
    empty = write_log(tmp_path / "named", images[-4:])
    _, err = run(cli.main, "review", empty.where, *words[2:], "--csv", file, code=2)
    assert "no image reviewed as none_of_the_classes without a name" in err
    for more in (["--csv", str(file), "--sample"], ["--out", str(tmp_path / "tasks.json")]):
        assert "--clusters goes without --out and --sample" in run(cli.main, *words, *more, code=2)[1]


def test_clusters_are_names_until_people_give_theirs(
    tiny_bundle: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = [Logged(png(np.full((28, 28), 9 * i, np.uint8)), "none_of_the_classes") for i in range(6)]
    log = write_log(tmp_path / "log", [*images[:5], replace(images[5], label="hedgehog")])
    later = NOW

    def said(image: Logged, model: str = "digits") -> tuple[str, str | None] | None:
        last = read_labels(log).of(model, "", 0, image.sha256)
        return last and (last.kind, last.label)

    def clusters(model: FittedModel, found: ImageDataset) -> list[int]:
        nonlocal later  # Meanwhile a person names the first image.
        write_labels(log, [Label(None, None, images[0].sha256, "cannot_tell", None, "page", later, "digits")])
        return [i % 2 for i in range(len(found))]

    monkeypatch.setattr("psc_core.calibrate.clusters_of", clusters)
    words = ["review", log.where, "--clusters", str(tiny_bundle), "--allow-factories", "tests.tiny:network"]
    later += timedelta(seconds=1)
    assert "5 images in 2 clusters: 3, 2; the page's Review tab names them (To name)" in run(cli.main, *words)[0]
    ordered = sorted(images[:5], key=lambda image: image.sha256)
    names = ["cluster 1", "cluster 2"] * 3
    for image, name in zip(ordered, names, strict=False):
        one = ("cannot_tell", None) if image is images[0] else ("none_of_the_classes", name)
        assert said(image) == one and said(image, "another") is None
    assert said(images[5]) == ("none_of_the_classes", "hedgehog")
    model = loaded(tiny_bundle)
    assert read_unknown(log, model)[0].classes == ("none_of_the_classes", "hedgehog")
    assert (
        "4 images in 2 clusters: 2, 2;" in run(cli.main, *words)[0]
    )  # What has only a cluster's name is grouped anew.
    others = [image for image in ordered if image is not images[0]]
    assert [said(image) for image in others] == [("none_of_the_classes", name) for name in names[:4]]
    text, _ = run(cli.main, *words, "--csv", tmp_path / "to-name.csv")
    assert "4 images in 2 clusters" in text and "import it" in text


def test_learns_what_people_reviewed(tmp_path: Path, run: Run) -> None:
    digits = opened("mnist")
    labels = digits.first_labels().tolist()
    images = labelled(digits, 120, plain)
    for i in [i for i in range(120, 800) if labels[i] == 7][:20]:
        content = png(np.ascontiguousarray(digits.image(i)[0][::-1, ::-1]))
        images.append(Logged(content, "none_of_the_classes", "upside down", sampled=False))
    write_log(tmp_path / "log", images)
    bundle, new = ROOT / "artifacts" / "dirty-mnist-resnet18", tmp_path / "new"
    words = ["--bundle", str(bundle), "--log", str(tmp_path / "log"), "--learn", "--out", str(new)]
    text, _ = run(cli.recalibrate_main, *words)
    assert "check reviewed" in text and "20 upside down" in text
    assert read_bundle(new).manifest.checks.names[-1] == "reviewed"  # type: ignore[union-attr]
    assert "has learnt from images that people reviewed" in (new / "README.md").read_text()
    later = ["--bundle", str(new), "--log", str(tmp_path / "log"), "--out", str(tmp_path / "later")]
    run(cli.recalibrate_main, *later)  # What was learnt stays, and the card says so.
    assert "has learnt from images that people reviewed" in (tmp_path / "later" / "README.md").read_text()
    named = ["--add-class", "upside down", "--out", str(tmp_path / "named")]
    assert "class upside down from 20 images" in run(cli.recalibrate_main, *words[:4], *named)[0]
    assert read_bundle(tmp_path / "named").manifest.classes[-1] == "upside down"
    assert "The class upside down was added from 20 images" in (tmp_path / "named" / "README.md").read_text()
    _, err = run(cli.recalibrate_main, *words[:4], *named, "--extend-density", "--overwrite", code=2)
    assert "do not go together" in err
    assert "--log-sample" in run(cli.recalibrate_main, *words, "--overwrite", "--until", "2026-11-19", code=2)[1]
