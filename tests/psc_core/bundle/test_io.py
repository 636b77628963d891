"""Reading and writing bundles: a bundle is whole or rejected, and the message names what is wrong."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from psc_core import PSC
from psc_core.bundle.io import check_target, read_bundle, write_bundle
from psc_core.bundle.manifest import PARTS
from psc_core.errors import BundleError
from tests.attacks import forge

ALLOW = ("tests.tiny:network",)


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def edit_manifest(bundle: Path, **changes: Any) -> None:
    file = bundle / "manifest.json"
    body = json.loads(file.read_text())
    for key, value in changes.items():
        if value is None:
            del body[key]
        else:
            body[key] = value
    file.write_text(json.dumps(body))


def edit_part(bundle: Path, part: str, change: Any) -> None:
    """Change tensors and make the manifest agree, as somebody with the format's specification could."""
    tensors = load((bundle / f"{part}.safetensors").read_bytes())
    change(tensors)
    forge.replace_part(bundle, part, save(tensors))


def test_files_of_a_bundle(tiny_bundle: Path) -> None:
    names = {file.name for file in tiny_bundle.iterdir()}
    assert names == {"manifest.json", "collapse.csv", *(f"{part}.safetensors" for part in PARTS)}
    assert set(read_bundle(tiny_bundle).parts) == set(PARTS)


def test_mode_of_a_bundle(tiny_bundle: Path) -> None:
    assert stat.S_IMODE(tiny_bundle.stat().st_mode) == 0o755


def test_saving_again_gives_the_same_bytes(tiny_bundle: Path, tmp_path: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    manifest = psc.save(tmp_path / "again")
    assert manifest.version == psc.version
    for part in PARTS:
        name = f"{part}.safetensors"
        assert (tmp_path / "again" / name).read_bytes() == (tiny_bundle / name).read_bytes()


def test_manifest_has_no_local_path(tiny_bundle: Path) -> None:
    text = (tiny_bundle / "manifest.json").read_text()
    assert str(Path.home()) not in text
    assert str(tiny_bundle.parent) not in text
    assert str(Path(__file__).parents[3]) not in text


def test_missing_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no manifest"):
        read_bundle(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"schema_version": 3}, "expected schema_version 1 to 2, got 3"),
        ({"schema_version": None}, "expected schema_version 1 to 2"),
        ({"classes": ["one"]}, "'classes'"),
        ({"surprise": 1}, "'surprise'"),
        ({"layers": None}, "'layers'"),
        ({"policy": {"alpha": 2.0, "ambiguity_threshold": 1.0, "coverage": 0.9}}, r"'policy\.alpha'"),
        ({"files": {}}, "expected files to be"),
        ({"files": {"../evil.safetensors": {"bytes": 1, "sha256": "0" * 64}}}, "expected files to be"),
    ],
)
def test_rejects_wrong_manifest(bundle: Path, changes: dict[str, Any], message: str) -> None:
    edit_manifest(bundle, **changes)
    with pytest.raises(BundleError, match=message):
        read_bundle(bundle)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 1}'])
def test_rejects_malformed_manifest(bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match="manifest"):
        read_bundle(bundle)


@pytest.mark.parametrize("part", PARTS)
def test_names_damaged_files(bundle: Path, part: str) -> None:
    file = bundle / f"{part}.safetensors"
    blob = bytearray(file.read_bytes())
    blob[-1] ^= 1
    file.write_bytes(bytes(blob))
    with pytest.raises(BundleError, match=rf"{part}\.safetensors: expected SHA-256"):
        read_bundle(bundle)
    file.write_bytes(bytes(blob[:-4]))
    with pytest.raises(BundleError, match=rf"{part}\.safetensors: expected \d+ bytes"):
        read_bundle(bundle)
    file.unlink()
    with pytest.raises(BundleError, match=rf"{part}\.safetensors: cannot be read"):
        read_bundle(bundle)


@pytest.mark.parametrize("part", PARTS)
def test_rejects_values_that_are_not_finite(bundle: Path, part: str) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        name = next(name for name, tensor in tensors.items() if tensor.is_floating_point() and tensor.numel())
        tensors[name] = torch.full_like(tensors[name], torch.nan)

    edit_part(bundle, part, poison)
    with pytest.raises(BundleError, match=rf"{part}\.safetensors: tensor .* NaN"):
        read_bundle(bundle)


MISSING = {
    "backbone": r"backbone does not fit the network: 1 missing \(body\.0\.bias\)",
    "projection": "expected tensors .*'channel_factor'.* for 'tucker', got ",
    "density": r"expected tensors .*'basis'.* for 'pooled\+\+', got ",
    "head": "expected tensors .*'bias'.* for 'laplace', got ",
    "calibration": "expected calibration tensors .*'entropies'.* got ",
}


@pytest.mark.parametrize("part", PARTS)
def test_rejects_missing_tensors(bundle: Path, part: str) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[min(tensors)]

    edit_part(bundle, part, drop)
    with pytest.raises(BundleError, match=MISSING[part]):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


GROWN = {
    "backbone": r"backbone: expected body\.2\.weight of shape \(16, 8, 3, 3\), got \(32, 8, 3, 3\)",
    "projection": r"expected tucker\.\w+ with axes .* got shape ",
    "density": r"expected pooled\+\+\.\w+ with axes .* got shape ",
    "head": r"expected laplace\.\w+ with axes .* got shape ",
    "calibration": r"calibration scores of one length, got .*\(300,\)",
}


@pytest.mark.parametrize("part", PARTS)
def test_rejects_wrong_shapes(bundle: Path, part: str) -> None:
    def grow(tensors: dict[str, torch.Tensor]) -> None:
        name = max(sorted(tensors), key=lambda key: tensors[key].numel())
        tensors[name] = torch.cat([tensors[name], tensors[name]])

    edit_part(bundle, part, grow)
    with pytest.raises(BundleError, match=GROWN[part]):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_other_number_of_classes(bundle: Path) -> None:
    edit_manifest(bundle, classes=["a", "b", "c"])
    with pytest.raises(BundleError, match="num_classes to be 3, got 10"):
        PSC.load(bundle, device="cpu", allow_factories=ALLOW)


def test_factories_need_permission(tiny_bundle: Path) -> None:
    with pytest.raises(BundleError, match=r"tests\.tiny:network"):
        PSC.load(tiny_bundle, device="cpu")


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
    again = psc.save(out)
    assert again.version == PSC.load(out, device="cpu", allow_factories=["tests.tiny:network"]).version
    assert (out / "report" / "report.md").read_text() == "mine"
    assert (out / "net.safetensors").read_bytes() == b"mine too"
    assert [entry.name for entry in tmp_path.iterdir()] == ["bundle"]


def test_tensors_that_share_memory(tiny_bundle: Path, tmp_path: Path) -> None:
    """A network cut by hooks may hold one module under two names."""
    bundle = read_bundle(tiny_bundle)
    weight = bundle.parts["backbone"]["body.0.weight"]
    parts = {**bundle.parts, "backbone": {**bundle.parts["backbone"], "body.a": weight, "body.b": weight[1:]}}
    write_bundle(tmp_path / "tied", bundle.manifest.model_dump(exclude={"version", "files"}), parts)
    again = read_bundle(tmp_path / "tied").parts["backbone"]
    assert torch.equal(again["body.a"], weight) and torch.equal(again["body.0.weight"], weight)
    assert torch.equal(again["body.b"], weight[1:])


def test_rejects_text_outside_utf8(tiny_bundle: Path, tmp_path: Path) -> None:
    bundle = read_bundle(tiny_bundle)
    fields = bundle.manifest.model_dump(exclude={"version", "files"})
    with pytest.raises(ValueError, match="text that UTF-8 cannot hold"):
        write_bundle(tmp_path / "b", {**fields, "provenance": {"train": "\udce9"}}, bundle.parts)
    assert not (tmp_path / "b").exists()


def test_rejects_a_mount_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be renamed, which is how a bundle is replaced."""
    out = tmp_path / "mounted"
    out.mkdir()
    monkeypatch.setattr(Path, "is_mount", lambda path: path == out)
    with pytest.raises(BundleError, match=r"is a mount point.*choose a folder inside it"):
        check_target(out)
    check_target(out / "bundle")
