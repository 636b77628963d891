import errno
import hashlib
import json
import os
import shlex
import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from pydantic import ValidationError

from psc_core import PSC, FitSettings
from psc_core.bundle import (
    CARD,
    CONTENT,
    MAX_ARGUMENT,
    PARTS,
    _exchange,
    check_network,
    check_target,
    fit_command,
    is_bundle,
    manifest_of,
    read_bundle,
    write_bundle,
)
from psc_core.cli.fit import parser
from psc_core.errors import BundleError, UsageError
from psc_core.report import PAGE
from psc_core.settings import DEFAULTS
from tools import forge

ALLOW = ("tests.tiny:network",)


def edit_manifest(bundle: Path, **changes: Any) -> None:
    file = bundle / "manifest.json"
    body = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            del body[key]
        else:
            body[key] = value
    file.write_text(json.dumps(body))


def test_files_of_a_bundle(tiny_bundle: Path) -> None:
    names = {file.name for file in tiny_bundle.iterdir()}
    others = {"collapse.csv", "README.md", "report.html", "report", "report.safetensors"}
    assert names == {"manifest.json", *others, *(f"{part}.safetensors" for part in PARTS)}
    assert set(read_bundle(tiny_bundle).parts) == set(PARTS)


def test_mode_of_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW).save(tmp_path / "private")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o755
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "private").iterdir()}
    assert modes == {0o600}  # Nobody else reads what is made of training images.


def test_who_may_not_read_a_bundle_learns_who_must(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(BundleError, match=rf"Permission denied\); let user {os.geteuid()} read it: chmod -R a\+rX"):
        read_bundle(tiny_bundle)


def test_saving_again_gives_the_same_bytes(tiny_bundle: Path, tmp_path: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    manifest = psc.save(tmp_path / "again")
    assert manifest.version == psc.version
    for part in PARTS:
        name = f"{part}.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tiny_bundle / name).read_bytes()


def test_a_number_that_no_manifest_holds_is_named(tiny_bundle: Path, tmp_path: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    psc.report["metrics"] = {"accuracy": float("nan")}
    with pytest.raises(BundleError, match="a manifest cannot hold this model's description: Out of range"):
        psc.save(tmp_path / "again")


def test_rejects_a_name_twice_in_a_header(bundle: Path) -> None:
    file = bundle / "density.safetensors"
    blob = file.read_bytes()
    length = int.from_bytes(blob[:8], "little")
    header = blob[8 : 8 + length].rstrip()
    name, entry = next((key, value) for key, value in json.loads(header).items() if key != "__metadata__")
    again = header[:-1] + f",{json.dumps(name)}:{json.dumps(entry)}}}".encode()
    blob = len(again).to_bytes(8, "little") + again + blob[8 + length :]
    file.write_bytes(blob)
    files = json.loads((bundle / "manifest.json").read_text())["files"]
    files[file.name] = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    edit_manifest(bundle, files=files)
    with pytest.raises(BundleError, match=f"the name '{name}' twice"):
        read_bundle(bundle)


def test_a_full_disk_is_named(tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(BundleError, match=rf"bytes to {tmp_path}/.* \(No space left on device\); free space there"):
        psc.save(tmp_path / "bundle")
    assert list(tmp_path.iterdir()) == []


def test_save_never_replaces_other_files(tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    with pytest.raises(BundleError, match="holds other files"):
        psc.save(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


def test_save_keeps_other_files_of_a_bundle(tiny_bundle: Path, tmp_path: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    out = tmp_path / "bundle"
    psc.save(out)
    (out / "report").mkdir()
    (out / "report" / "report.md").write_text("mine")
    (out / "net.safetensors").write_bytes(b"mine too")
    for name in (PAGE, CONTENT, CARD):
        (out / name).write_text(f"about version {psc.version}")
    again = psc.save(out)
    assert again.version == PSC.load(out, device="cpu", allow_factories=["tests.tiny:network"]).version
    assert (out / "report" / "report.md").read_text() == "mine"
    assert (out / "net.safetensors").read_bytes() == b"mine too" and psc.version in (out / CARD).read_text()
    replace(psc, name="another").save(out)
    assert (out / "net.safetensors").exists() and not any((out / name).exists() for name in (PAGE, CONTENT, CARD))
    (out / CARD).write_text("mine")
    psc.save(out)
    assert (out / CARD).read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


@pytest.mark.parametrize("error", [OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()])
def test_a_bundle_that_cannot_be_replaced_stays(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    (bundle / "mine.txt").write_text("mine")
    before, rename = read_bundle(bundle), Path.rename
    monkeypatch.setattr("psc_core.bundle._exchange", lambda *_: False)  # Where it can, nothing is left to fail.

    def refused(path: Path, target: Path) -> Path:
        if target == bundle and not path.name.endswith(".old"):
            raise error
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    raised = (BundleError, r"cannot replace .*Permission denied") if isinstance(error, OSError) else (type(error), "^$")
    with pytest.raises(raised[0], match=raised[1]):
        write_bundle(bundle, before.manifest.model_dump(exclude={"version", "files"}), before.parts)
    assert read_bundle(bundle).manifest == before.manifest and (bundle / "mine.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == [bundle.name]


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_bundle_is_replaced_in_one_step(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_exchange: bool
) -> None:
    (bundle / "mine.txt").write_text("mine")
    before, rename, there = read_bundle(bundle), Path.rename, []
    if not can_exchange:
        monkeypatch.setattr("psc_core.bundle._exchange", lambda *_: False)
    elif not _exchange(bundle, bundle):
        pytest.skip("this file system exchanges no folders")

    def watched(path: Path, target: Path) -> Path:
        found = rename(path, target)
        there.append(is_bundle(bundle))
        return found

    monkeypatch.setattr(Path, "rename", watched)
    fields = before.manifest.model_dump(exclude={"version", "files"}) | {"name": "new"}
    write_bundle(bundle, fields, before.parts)
    assert all(there) == can_exchange
    assert read_bundle(bundle).manifest.name == "new" and (bundle / "mine.txt").read_text() == "mine"
    assert [entry.name for entry in tmp_path.iterdir()] == [bundle.name]


def test_where_the_old_files_are_is_said(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (bundle / "mine.txt").write_text("mine")
    before, rename = read_bundle(bundle), Path.rename

    def refused(path: Path, target: Path) -> Path:
        if path.name == "mine.txt":
            raise OSError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)
    with pytest.raises(BundleError, match=r"Permission denied.*its former content is in .*\.old"):
        write_bundle(bundle, before.manifest.model_dump(exclude={"version", "files"}), before.parts)
    (old,) = tmp_path.glob(".*.old")
    assert (old / "mine.txt").read_text() == "mine" and set(read_bundle(bundle).parts) == set(before.parts)


def test_tensors_that_share_memory(tiny_bundle: Path, tmp_path: Path) -> None:
    """A network cut by hooks may hold one module under two names."""
    bundle = read_bundle(tiny_bundle)
    weight = bundle.parts["backbone"]["body.0.weight"]
    parts = {**bundle.parts, "backbone": {**bundle.parts["backbone"], "body.a": weight, "body.b": weight[1:]}}
    write_bundle(tmp_path / "tied", bundle.manifest.model_dump(exclude={"version", "files"}), parts)
    again = read_bundle(tmp_path / "tied").parts["backbone"]
    assert torch.equal(again["body.a"], weight) and torch.equal(again["body.0.weight"], weight)
    assert torch.equal(again["body.b"], weight[1:])


def test_rejects_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be renamed, which is how a bundle is replaced."""
    out = tmp_path / "mounted"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    with pytest.raises(BundleError, match=r"is a mount point.*choose a folder inside it"):
        check_target(out)
    check_target(out / "bundle")


@pytest.mark.parametrize("target", ["releases/41", "releases/none"])
def test_a_link_stays_and_what_it_points_to_too(bundle: Path, tmp_path: Path, target: str) -> None:
    before = read_bundle(bundle)
    releases = tmp_path / "releases"
    releases.mkdir()
    (bundle / "NOTES.txt").write_text("ours")
    bundle.rename(releases / "41")
    link = tmp_path / "current"
    link.symlink_to(target)
    held = {file.name: file.read_bytes() for file in (releases / "41").iterdir() if file.is_file()}
    for write in (
        lambda: check_target(link),
        lambda: write_bundle(link, before.manifest.model_dump(exclude={"version", "files"}), before.parts),
    ):
        with pytest.raises(BundleError, match="ln -sfn"):
            write()
    assert link.is_symlink() and str(link.readlink()) == target
    assert held == {file.name: file.read_bytes() for file in (releases / "41").iterdir() if file.is_file()}
    assert {each.name for each in tmp_path.iterdir()} >= {"current", "releases"}
    assert not [*tmp_path.glob(".*")] and {each.name for each in releases.iterdir()} == {"41"}


def test_a_bundle_is_replaced_only_where_that_is_allowed(bundle: Path) -> None:
    check_target(bundle)
    with pytest.raises(UsageError, match="--overwrite"):
        check_target(bundle, overwrite=False)


def test_manifest_has_no_local_path(tiny_bundle: Path) -> None:
    text = (tiny_bundle / "manifest.json").read_text()
    assert str(Path.home()) not in text
    assert str(tiny_bundle.parent) not in text
    assert str(Path(__file__).parents[2]) not in text


def test_rejects_text_outside_utf8(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = read_bundle(tiny_bundle)
    fields = bundle.manifest.model_dump(exclude={"version", "files"})
    with pytest.raises(BundleError, match="text that UTF-8 cannot hold"):
        write_bundle(tmp_path / "b", {**fields, "provenance": {"train": "\udce9"}}, bundle.parts)
    assert not (tmp_path / "b").exists()


def test_rejects_arguments_beyond_their_limit() -> None:
    network = {"spec": "torchvision:resnet18", "num_classes": 10, "model_args": {"sizes": [1, MAX_ARGUMENT]}}
    check_network(network)
    with pytest.raises(UsageError, match="numbers up to 65536"):
        check_network({**network, "model_args": {"sizes": [1, MAX_ARGUMENT + 1]}})


def test_classes_are_composed(tiny_bundle: Path) -> None:
    written = json.loads((tiny_bundle / "manifest.json").read_text())
    written["classes"][0] = "cafe\u0301"
    assert manifest_of(written).classes == ("caf\u00e9", *written["classes"][1:])
    with pytest.raises(ValidationError, match="differ from each other"):
        manifest_of(written | {"classes": ["caf\u00e9", *written["classes"][:-1]]})


def test_an_older_bundle_names_the_command_that_fits_it_again(shipped_bundle: Path) -> None:
    """With every setting that decides about it, as psc-fit itself reads them."""
    body = json.loads((shipped_bundle / "manifest.json").read_text())
    changed = {"task": "regression", "layer": "layer4.0.downsample.0", "layers": "layer4", "granularity": "blocks",
               "epsilon": 1e-05, "c_proj": 2, "d_proj": 3, "minimum_dim": 4, "no_second_scaling": True,
               "density": "mahalanobis++", "pca": 5, "head": "dve", "head_input": "z", "predictions": "original",
               "alpha": 0.1, "coverage": 0.9, "risk": 0.2, "max_width": 1.5, "ood_score": "density",
               "precision": "bf16", "max_images": 6, "stored_images": 12, "seed": 7}  # fmt: skip
    assert {*FitSettings().recorded()} - {*changed} == {"batch_images", "max_memory"}
    body["provenance"]["settings"] = {**changed, "batch_images": 8, "flag_of_before": 9, "out": "mine"}
    program, *words = shlex.split(fit_command(body))
    args = vars(parser().parse_args(words))
    assert program == "psc-fit"
    assert {name: args[name] for name in changed} == changed
    assert args["batch_images"] == DEFAULTS.batch_images
    assert (args["model"], args["model_arg"]) == ("torchvision:resnet18", ["stem=small", "in_channels=1"])
    assert {str(args[name]) for name in ("weights", "preprocess", "train", "val", "out")} == {"FILE", "DIR"}


GENERAL = "psc-fit --model SPEC --weights FILE --preprocess FILE --train DIR --val DIR --out DIR"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("layers", "layer[34]"),
        *(
            ("head", each)
            for each in ("$(reboot)", "a b", "\x1b[2J", "laplace\n", "--fresh", "", ["laplace"], "x" * 2000)
        ),
    ],
)
def test_a_recorded_flag_that_is_no_plain_word_is_not_repeated(where: str, value: Any) -> None:
    recorded = {"model": "timm:resnet50.a1_in1k", "model_args": {}, "settings": {"alpha": 0.1}}
    assert fit_command({"provenance": recorded}).startswith("psc-fit --model timm:resnet50.a1_in1k --alpha 0.1 ")
    recorded["settings"][where] = value  # type: ignore[index]
    assert fit_command({"provenance": recorded}) == GENERAL


@pytest.mark.parametrize("provenance", [None, [], {}, {"settings": 1}, {"settings": {}, "model": 1, "model_args": {}}])
def test_a_manifest_without_provenance_names_a_general_command(provenance: Any) -> None:
    assert fit_command({"provenance": provenance}) == fit_command({}) == GENERAL


@pytest.mark.parametrize(
    ("target", "flags"),
    [
        ({"name": "count", "unit": "discs"}, " --target count --unit discs"),
        ({"name": "angle", "unit": ""}, " --target angle"),
        ({"name": "value", "unit": "m"}, " --unit m"),
        ({"name": "$(reboot)", "unit": "m/s"}, " --target TARGET --unit UNIT"),
    ],
)
def test_a_regression_is_fitted_again_with_its_column_and_unit(target: dict[str, str], flags: str) -> None:
    provenance = {"model": "timm:resnet50.a1_in1k", "model_args": {}, "settings": {"task": "regression"}}
    assert f" --task regression{flags} --weights" in fit_command({"provenance": provenance, "target": target})


@pytest.mark.parametrize("model", ["os:system", "torchvision:resnet18;reboot", "timm:../x", "torchvision:"])
def test_only_networks_of_a_library_are_named(model: str) -> None:
    assert fit_command({"provenance": {"settings": {}, "model": model, "model_args": {}}}) == GENERAL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"schema_version": each}, "schema_version 7, .*: psc-fit ") for each in (1, None, True, 5.0, "5")),
        ({"target": {"name": "age", "unit": "years"}}, "field target"),
        ({"task": "ranking"}, "field task"),
        ({"task": "regression"}, r"field policy\.max_width"),
        ({"policy": 3}, "field policy:"),
        ({"classes": ["one"]}, "field classes:"),
        ({"surprise": 1}, "field surprise:"),
        ({"layers": None}, "field layers:"),
        ({"policy": {"alpha": 2.0, "ambiguity_threshold": 1.0, "coverage": 0.9}}, r"field policy\.alpha:"),
        ({"files": {}}, "expected files to be"),
        ({"files": {"../evil.safetensors": {"bytes": 1, "sha256": "0" * 64}}}, "expected files to be"),
    ],
)
def test_rejects_wrong_manifest(bundle: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(bundle, **changes)
    with pytest.raises(BundleError, match=message):
        read_bundle(bundle)


def test_names_damaged_and_missing_files(bundle: Path) -> None:
    for part in PARTS:
        file = bundle / f"{part}.safetensors"
        whole = file.read_bytes()
        for content, said in ((whole[:-1] + bytes([whole[-1] ^ 1]), "SHA-256"), (whole[:-4], r"expected \d+ bytes")):
            file.write_bytes(content)
            with pytest.raises(BundleError, match=rf"{part}\.safetensors: .*{said}"):
                read_bundle(bundle)
        file.unlink()
        with pytest.raises(BundleError, match=rf"{part}\.safetensors: cannot be read"):
            read_bundle(bundle)
        file.write_bytes(whole)
    (bundle / "manifest.json").unlink()
    with pytest.raises(BundleError, match="no manifest"):
        read_bundle(bundle)


@pytest.mark.parametrize("part", ["backbone", "calibration"])
def test_rejects_values_that_are_not_finite(bundle: Path, part: str) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
        tensors[name] = torch.full_like(tensors[name], torch.nan)

    forge.edit_part(bundle, part, poison)
    with pytest.raises(BundleError, match=rf"{part}\.safetensors: tensor .* NaN"):
        read_bundle(bundle)


def test_the_old_bundle_goes_after_the_new_one(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, rename, fsync, rmtree = read_bundle(bundle), Path.rename, os.fsync, shutil.rmtree
    events: list[str] = []

    def synced(descriptor: int) -> None:
        events.append(f"synced {Path(f'/proc/self/fd/{descriptor}').readlink().name}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append(f"renamed {to.name}"), rename(path, to))[1])
    monkeypatch.setattr(
        "psc_core.bundle._exchange", lambda one, to: (events.append(f"renamed {to.name}"), _exchange(one, to))[1]
    )
    monkeypatch.setattr(shutil, "rmtree", lambda path: (events.append("removed"), rmtree(path)))
    write_bundle(bundle, before.manifest.model_dump(exclude={"version", "files"}), before.parts)
    replaced = events.index("renamed bundle")
    assert {*events[:replaced]} >= {"synced manifest.json", *(f"synced {part}.safetensors" for part in before.parts)}
    assert events[replaced:].index(f"synced {tmp_path.name}") < events[replaced:].index("removed")
    assert "removed" not in events[:replaced]


@pytest.mark.parametrize(("model", "named"), [("hf:$(reboot)", "hf:DIR"), ("onnx:net.onnx", "onnx:FILE")])
def test_a_network_that_has_its_weights_needs_none(model: str, named: str) -> None:
    command = fit_command({"provenance": {"model": model, "model_args": {}, "settings": {"alpha": 0.1}}})
    assert command.startswith(f"psc-fit --model {named} --alpha 0.1 ")
    assert vars(parser().parse_args(shlex.split(command)[1:]))["weights"] is None
