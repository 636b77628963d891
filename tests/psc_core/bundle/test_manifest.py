"""Manifests that are no JSON, hold what UTF-8 cannot, or describe networks beyond their limits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from psc_core.bundle import MAX_ARGUMENT, check_network, manifest_of, read_bundle, write_bundle
from psc_core.errors import BundleError, UsageError


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 6}'])
def test_rejects_malformed_manifest(bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    with pytest.raises(BundleError, match="manifest"):
        read_bundle(bundle)


def test_manifest_has_no_local_path(tiny_bundle: Path) -> None:
    text = (tiny_bundle / "manifest.json").read_text()
    assert str(Path.home()) not in text
    assert str(tiny_bundle.parent) not in text
    assert str(Path(__file__).parents[3]) not in text


@pytest.mark.parametrize("background", ["white", "none"])
def test_a_manifest_that_names_no_background_means_black(tiny_bundle: Path, background: str) -> None:
    written = json.loads((tiny_bundle / "manifest.json").read_text())
    assert "background" not in written["preprocess"] and manifest_of(written).preprocess.background == "black"
    written["preprocess"]["background"] = background
    assert manifest_of(written).preprocess.background == background
    written["preprocess"]["background"] = "green"
    with pytest.raises(UsageError, match="background"):
        manifest_of(written)


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
