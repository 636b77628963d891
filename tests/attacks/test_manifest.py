"""Hostile manifests: each is rejected at once, with one line that names the field."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psc_core import PSC
from psc_core.bundle import MAX_MANIFEST_BYTES, read_bundle
from psc_core.errors import BundleError
from tools import forge

LONGEST_S = 5.0


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < LONGEST_S


def rejection(bundle: Path) -> str:
    """The message, which has to fit a log line."""
    with pytest.raises(BundleError) as caught:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    message = str(caught.value)
    assert len(message) < 2000
    return message


def test_rejects_a_huge_manifest(bundle: Path) -> None:
    with (bundle / "manifest.json").open("ab") as file:
        file.truncate(1 << 40)
    assert f"at most {MAX_MANIFEST_BYTES} bytes" in rejection(bundle)


@pytest.mark.parametrize("opening", ["[", '{"a":'])
@pytest.mark.parametrize("levels", [40, 900, 100_000])
def test_rejects_deep_nesting(bundle: Path, opening: str, levels: int) -> None:
    body = forge.read(bundle)
    closing = "]" if opening == "[" else "}"
    nested = opening * levels + "1" + closing * levels
    text = json.dumps({**body, "provenance": {"x": "HERE"}}).replace('"HERE"', nested)
    (bundle / "manifest.json").write_text(text)
    assert "levels of nesting" in rejection(bundle)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
@pytest.mark.parametrize("field", ["alpha", "ambiguity_threshold"])
def test_rejects_numbers_outside_json(bundle: Path, number: str, field: str) -> None:
    text = (bundle / "manifest.json").read_text()
    value = json.dumps(forge.read(bundle)["policy"][field])
    (bundle / "manifest.json").write_text(text.replace(f'"{field}": {value}', f'"{field}": {number}'))
    rejection(bundle)


@pytest.mark.parametrize(
    "content", [b"\x00" * 100, b"null", b"1", b'"x"', b"[[]]", b"{}{}", '{"ключ": 1}'.encode("utf-16")]
)
def test_rejects_other_json(bundle: Path, content: bytes) -> None:
    (bundle / "manifest.json").write_bytes(content)
    assert "manifest" in rejection(bundle)


def test_rejects_duplicate_names(bundle: Path) -> None:
    """Readers differ in which of the two they take."""
    text = (bundle / "manifest.json").read_text()
    for name, forged in (("name", '"name": "evil", "name":'), ("nll_nats", '"nll_nats": 0, "nll_nats":')):
        (bundle / "manifest.json").write_text(text.replace(f'"{name}":', forged, 1))
        assert f"{name!r} twice" in rejection(bundle)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_rejects_other_encodings(bundle: Path, encoding: str) -> None:
    file = bundle / "manifest.json"
    file.write_bytes(file.read_text().encode(encoding))
    assert "expected JSON" in rejection(bundle)


WRONG: list[tuple[str, Any, str]] = [
    ("name", "", "name"),
    ("name", "x" * 201, "name"),
    ("name", 7, "name"),
    ("name", "\ud800", "name"),
    ("classes", ["a"] * 10, "differ"),
    ("classes", list(map(str, range(9))), "to be 9, got 10"),
    ("classes", "0123456789", "classes"),
    ("precision", "fp8", "precision"),
    ("predictions", "original", "predictions"),
    ("head", None, "field head"),
    ("layers", [], "layers"),
    ("layers", ["2"], "head.layers"),
    ("policy.alpha", "0.05", "policy.alpha"),
    ("policy.alpha", 1e-6, "alpha"),
    ("policy.coverage", 0.999999, "coverage"),
    ("policy.extra", 1, "policy.extra"),
    ("calibration.entropy_weight", 0.0, "entropy_weight"),
    ("preprocess.mode", "CMYK", "mode"),
    ("preprocess.height", 10**9, "height|pixels"),
    ("preprocess.height", 10**18, "height"),
    ("preprocess.height", 28.0, "height"),
    ("preprocess.height", True, "height"),
    ("preprocess.resize", 10**9, "resize"),
    ("preprocess.std", [0.0], "std"),
    ("preprocess.std", [1e-300], "finite"),
    ("preprocess.std", ["1"], "std"),
    ("preprocess.std", [], "stds"),
    ("preprocess.mean", [0.1, 0.2], "means"),
    ("preprocess.surprise", 1, "surprise"),
    ("backbone.keep_output", "false", "keep_output"),
    ("backbone.keep_output", True, "keep_output"),
    ("backbone.layers", "2", "layers"),
    ("backbone.network", None, "files"),
    ("backbone.network.num_classes", 10**9, "num_classes"),
    ("backbone.network.num_classes", "10", "num_classes"),
    ("backbone.network.model_args", [], "model_args"),
    ("backbone.network.model_args", {"in_channels": 10**9}, "model_args"),
    ("backbone.network.model_args", {"surprise": 1}, "surprise"),
    ("backbone.hooks", {"stop": None}, "dropped"),
    ("backbone.hooks", {"stop": None, "dropped": [], "net": 1}, "net"),
    ("projection.method", "pickle", "method"),
    ("projection.channels", 10**9, "'tucker' with sizes"),
    ("projection.channels", -1, "channels"),
    ("projection.positions", [10**9], "'tucker' with sizes"),
    ("projection.positions", [49, 49], "positions"),
    ("projection.positions", [], "positions"),
    ("projection.c_proj", 10**9, "dim"),
    ("projection.d_proj", 0, "d_proj"),
    ("density.kind", "os:system", "kind"),
    ("density.sizes", {"dim": 10**9, "kept": 10**9, "classes": 10}, "dim"),
    ("density.sizes.kept", 10**9, "sizes"),
    ("density.sizes.kept", 0, "kept"),
    ("density.record", {"components": "41"}, "record"),
    ("head.kind", ["laplace"], "kind"),
    ("head.kind", "duq", "tensors"),
    ("head.sizes", {}, "sizes.classes"),
    ("calibration.images", 10**9, "calibration"),
    ("calibration.images", 0, "images"),
    ("collapse", [], "collapse"),
    ("metrics", None, "metrics"),
    ("metrics", {"x": "\ud800"}, "metrics"),
    ("provenance", {"\udfff": 1}, "provenance"),
    ("collapse", {"notes": ["\ud800"]}, "notes"),
    ("files", [], "files"),
    ("files", {}, "files"),
]


@pytest.mark.parametrize(("where", "value", "message"), WRONG, ids=[f"{w}={str(v)[:20]}" for w, v, _ in WRONG])
def test_names_the_wrong_field(bundle: Path, where: str, value: Any, message: str) -> None:
    forge.assign(bundle, where, value)
    text = rejection(bundle)
    assert any(option in text for option in message.split("|")), text


SECTIONS = ("", "policy", "preprocess", "backbone", "backbone.network", "projection", "density", "calibration")


@pytest.mark.parametrize("where", SECTIONS)
def test_rejects_missing_fields(bundle: Path, where: str) -> None:
    def section(body: dict[str, Any]) -> dict[str, Any]:
        for step in filter(None, where.split(".")):
            body = body[step]
        return body

    whole = forge.read(bundle)
    for key in section(whole):
        if key in ("version", "interpolation", "resizer", "risk"):  # Without: bilinearly, by Pillow, none is shown.
            continue
        forge.write(bundle, json.loads(json.dumps(whole)))
        forge.edit(bundle, lambda body, key=key: section(body).pop(key))
        rejection(bundle)


OTHER_FILES = ("../evil.safetensors", "/etc/passwd", "head.safetensors/../../x", "backbone.pkl", "C:\\x", "", "\x00")


@pytest.mark.parametrize("name", [*OTHER_FILES, "manifest.json"])
def test_opens_no_other_file(bundle: Path, name: str) -> None:
    forge.edit(bundle, lambda body: body["files"].update({name: {"bytes": 1, "sha256": "0" * 64}}))
    assert "files" in rejection(bundle)


def test_names_are_never_paths(bundle: Path) -> None:
    forge.assign(bundle, "name", "../../etc/cron.d/x")
    forge.assign(bundle, "classes", [f"../{k}" for k in range(10)])
    psc = PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert psc.classes[3] == "../3"


def test_rejects_an_edited_manifest(bundle: Path) -> None:
    body = forge.read(bundle)
    body["policy"]["alpha"] = 0.5
    (bundle / "manifest.json").write_text(json.dumps(body))
    with pytest.raises(BundleError, match="the manifest was edited"):
        read_bundle(bundle)


def test_never_runs_a_regular_expression_of_a_bundle(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    collapse = forge.read(bundle)["collapse"]
    collapse["pattern"] = "(a+)+$("  # It could not even be compiled.
    forge.assign(bundle, "collapse", collapse)
    compiled: list[object] = []
    compile_pattern = re._compile  # type: ignore[attr-defined]  # Of every function of re.
    monkeypatch.setattr(re, "_compile", lambda *given: (compiled.append(given[0]), compile_pattern(*given))[1])
    PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert collapse["pattern"] not in compiled


def test_manifest_is_read_once(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The manifest is read once: later changes cannot pair its promises with other tensors."""
    calm = PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    original = Path.resolve
    manifest = bundle / "manifest.json"

    def swap(self: Path, strict: bool = False) -> Path:
        if self.suffix == ".safetensors":
            manifest.write_text('{"schema_version": 4}')
        return original(self, strict)

    monkeypatch.setattr(Path, "resolve", swap)
    psc = PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert manifest.read_text() == '{"schema_version": 4}'
    assert (psc.version, psc.policy) == (calm.version, calm.policy)
