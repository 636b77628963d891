"""Hostile bundles: files, safetensors headers, manifests and networks; each is rejected at once, and nothing runs."""

import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from psc_core import PSC, load_network
from psc_core.bundle import MAX_MANIFEST_BYTES, PARTS, read_bundle
from psc_core.errors import BundleError, NetworkError
from tests.conftest import ROOT
from tools import forge

needs_unix = pytest.mark.skipif(sys.platform == "win32", reason="no such files")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 5.0


def rejection(bundle: Path) -> str:
    """The message, which has to fit a log line."""
    with pytest.raises(BundleError) as caught:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    message = str(caught.value)
    assert len(message) < 2000
    return message


@needs_unix
@pytest.mark.parametrize("name", ["manifest.json", "head.safetensors"])
def test_rejects_links_out_of_the_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(bundle / name, outside)
    (bundle / name).symlink_to(outside)
    with pytest.raises(BundleError, match=name):
        read_bundle(bundle)


@needs_unix
def test_accepts_links_inside_the_bundle(bundle: Path, tmp_path: Path) -> None:
    """Mounted volumes and releases behind a ``current`` link look like this."""
    (bundle / "..data").mkdir()
    for file in [*bundle.glob("*.safetensors"), bundle / "manifest.json"]:
        shutil.move(file, bundle / "..data" / file.name)
        file.symlink_to(Path("..data") / file.name)
    (tmp_path / "current").symlink_to(bundle)
    PSC.load(tmp_path / "current", device="cpu", allow_factories=forge.ALLOW)


@needs_unix
@pytest.mark.parametrize(
    ("place", "accepted"),
    [
        ("cache/models--org--net/blobs", True),
        ("cache/blobs/ab", True),  # What repositories share.
        ("cache/models--org--other/blobs", False),
        ("cache", False),
        ("blobs", False),
    ],
)
@pytest.mark.parametrize("snapshots", ["models--org--net/snapshots", "org/snapshots", "models--org--net/bundles"])
def test_links_of_the_hugging_face_cache(
    bundle: Path, tmp_path: Path, place: str, accepted: bool, snapshots: str
) -> None:
    snapshot, blobs = tmp_path / "cache" / snapshots / "0123abcd", tmp_path / place
    snapshot.mkdir(parents=True)
    blobs.mkdir(parents=True, exist_ok=True)
    for file in bundle.iterdir():
        shutil.move(file, snapshot / file.name)
    shutil.move(snapshot / "head.safetensors", blobs / "digest")
    (snapshot / "head.safetensors").symlink_to(os.path.relpath(blobs / "digest", snapshot))
    if accepted and snapshots == "models--org--net/snapshots":
        assert "head" in read_bundle(snapshot).parts
    else:
        with pytest.raises(BundleError, match="link to elsewhere"):
            read_bundle(snapshot)


@needs_unix
@pytest.mark.parametrize("name", ["manifest.json", "head.safetensors"])
@pytest.mark.parametrize("kind", ["device", "loop", "pipe", "folder", "dangling"])
def test_rejects_what_is_not_a_file(bundle: Path, name: str, kind: str) -> None:
    """Neither read for ever (``/dev/zero``) nor waited for (a pipe nobody writes to)."""
    file = bundle / name
    file.unlink()
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    else:
        file.symlink_to({"device": "/dev/zero", "loop": name, "dangling": "nowhere"}[kind])
    if name != "manifest.json":
        forge.edit(bundle, lambda body: body["files"][name].update(bytes=0))
    with pytest.raises(BundleError, match=name):
        read_bundle(bundle)


def test_rejects_a_sparse_terabyte(bundle: Path) -> None:
    with (bundle / "head.safetensors").open("ab") as file:
        file.truncate(1 << 40)
    with pytest.raises(BundleError, match=r"head\.safetensors"):
        read_bundle(bundle)
    forge.edit(bundle, lambda body: body["files"]["head.safetensors"].update(bytes=1 << 40))
    with pytest.raises(BundleError, match=r"head\.safetensors"):
        read_bundle(bundle)


F32 = {"a": forge.entry([2], 0, 8)}
HEADERS: dict[str, bytes] = {
    "empty": b"",
    "cut short": b"\x01",
    "header of 2^63 bytes": forge.safetensors(F32, b"\0" * 8, length=1 << 63),
    "header of 99 MB": forge.safetensors(F32, b"\0" * 8, length=99_000_000),
    "overlapping": forge.safetensors({"a": forge.entry([2], 0, 8), "b": forge.entry([2], 4, 12)}, b"\0" * 12),
    "gap": forge.safetensors({"a": forge.entry([2], 0, 8), "b": forge.entry([2], 12, 20)}, b"\0" * 20),
    "beyond the end": forge.safetensors({"a": forge.entry([20], 0, 80)}, b"\0" * 8),
    "backwards": forge.safetensors({"a": forge.entry([2], 8, 0)}, b"\0" * 8),
    "size that wraps around": forge.safetensors({"a": forge.entry([1 << 62, 4], 0, 8)}, b"\0" * 8),
    "nothing, 2^62 wide": forge.safetensors({"a": forge.entry([0, 1 << 62], 0, 0)}),
    "negative": forge.safetensors({"a": forge.entry([-2], 0, 8)}, b"\0" * 8),
    "fraction": forge.safetensors({"a": forge.entry([2.0], 0, 8)}, b"\0" * 8),
    "a thousand axes": forge.safetensors({"a": forge.entry([1] * 1000, 0, 4)}, b"\0" * 4),
    "deep": forge.safetensors(b'{"__metadata__":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "not JSON": forge.safetensors(b"\xff\xfe"),
    "pickle": b"\x80\x04\x95" + b"\0" * 100,
    **{
        f"type {dtype}": forge.safetensors({"a": forge.entry([2], 0, 2 * size, dtype)}, b"\1" * 2 * size)
        for dtype, size in {"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "F4": 1, "C64": 8, "U16": 2, "XX": 4}.items()
    },
}


@pytest.mark.parametrize("part", ["backbone", "density", "calibration"])
@pytest.mark.parametrize("case", HEADERS)
def test_rejects_wrong_safetensors_headers(bundle: Path, case: str, part: str) -> None:
    forge.replace_part(bundle, part, HEADERS[case])
    rejection(bundle)


def change_tensor(bundle: Path, part: str, change: Any) -> list[str]:
    """Change each tensor; their names."""
    tensors = load_file(bundle / f"{part}.safetensors")
    changed = {name: change(tensor).contiguous() for name, tensor in tensors.items()}
    forge.replace_part(bundle, part, save(changed))
    return list(tensors)


def to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor.float()


def zeros(*shape: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: torch.zeros(shape, dtype=tensor.dtype)


CHANGES = {
    **{str(dtype): to(dtype) for dtype in (torch.float64, torch.float16, torch.int64, torch.complex64)},
    **{f"shape {shape}": zeros(*shape) for shape in ((0,), (1,), (), (1, 1, 1, 1, 1))},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("change", CHANGES)
def test_rejects_other_tensors(bundle: Path, part: str, change: str) -> None:
    names = change_tensor(bundle, part, CHANGES[change])
    told = rejection(bundle)
    assert any(name.rpartition(".")[2] in told for name in (part, *names)), told


@pytest.mark.parametrize("part", PARTS)
def test_rejects_a_missing_tensor(bundle: Path, part: str) -> None:
    forge.edit_part(bundle, part, lambda tensors: tensors.pop(min(tensors)))
    assert re.search("expected|missing", rejection(bundle))


@pytest.mark.parametrize("part", ["backbone", "projection", "density", "head"])
def test_rejects_values_that_overflow(bundle: Path, part: str) -> None:
    largest = float(np.finfo(np.float32).max)
    change_tensor(bundle, part, lambda tensor: torch.full_like(tensor, largest))
    assert "finite features and outputs" in rejection(bundle)


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
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"schema_version": 7}', b"\0" * 100, b"null", b"1", b'"x"', b"[[]]", b"{}{}"],
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
    ("name", "\ud800", "name"),
    ("classes", ["a"] * 10, "differ"),
    ("classes", list(map(str, range(9))), "to be 9, got 10"),
    ("predictions", "original", "predictions"),
    ("head", None, "field head"),
    ("layers", [], "layers"),
    ("layers", ["2"], "head.layers"),
    ("policy.alpha", "0.05", "policy.alpha"),
    ("policy.alpha", 1e-6, "alpha"),
    ("policy.coverage", 0.999999, "coverage"),
    ("calibration.entropy_weight", 0.0, "entropy_weight"),
    ("preprocess.mode", "CMYK", "mode"),
    ("preprocess.height", 10**9, "height|pixels"),
    ("preprocess.height", True, "height"),
    ("preprocess.resize", 10**9, "resize"),
    ("preprocess.std", [0.0], "std"),
    ("preprocess.std", [1e-300], "finite"),
    ("preprocess.mean", [0.1, 0.2], "means"),
    ("preprocess.surprise", 1, "surprise"),
    ("backbone.keep_output", "false", "keep_output"),
    ("backbone.keep_output", True, "keep_output"),
    ("backbone.network", None, "files"),
    ("backbone.network.num_classes", 10**9, "num_classes"),
    ("backbone.network.model_args", {"in_channels": 10**9}, "model_args"),
    ("backbone.network.model_args", {"surprise": 1}, "surprise"),
    ("backbone.hooks", {"stop": None, "dropped": [], "net": 1}, "net"),
    ("projection.method", "pickle", "method"),
    ("projection.channels", 10**9, "'tucker' with sizes"),
    ("projection.positions", [10**9], "'tucker' with sizes"),
    ("projection.positions", [], "positions"),
    ("projection.c_proj", 10**9, "dim"),
    ("projection.d_proj", 0, "d_proj"),
    ("density.kind", "os:system", "kind"),
    ("density.sizes", {"dim": 10**9, "kept": 10**9, "classes": 10}, "dim"),
    ("density.sizes.kept", 10**9, "sizes"),
    ("density.record", {"components": "41"}, "record"),
    ("head.kind", "duq", "tensors"), ("head.sizes", {}, "sizes.classes"),
    ("calibration.images", 10**9, "calibration"), ("calibration.images", 0, "images"),
    ("metrics", {"x": "\ud800"}, "metrics"), ("provenance", {"\udfff": 1}, "provenance"),
    ("collapse", {"notes": ["\ud800"]}, "notes"), ("files", {}, "files"),
    ("checks.images", 7, "(7, 150) values of the checks"),
    ("checks.names", ["texture", "colour"], "texture"), ("checks.names", ["content"], "checks.names (texture)"),
    *(("checks.texture.counts_below", value, "checks.texture.counts_below") for value in (0.0, 1.5)),
    ("checks", {"names": ["content", "confidence"], "images": 150, "texture": None}, "texture."),
]  # fmt: skip


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


MARK = Path("pwned")


class Payload:
    """Pickled, it creates a file when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (MARK,)


@pytest.fixture
def nothing_ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    assert not MARK.exists()


def rejection_of(bundle: Path, **network: Any) -> str:
    forge.edit(bundle, lambda body: body["backbone"]["network"].update(network))
    return rejection(bundle)


@pytest.mark.parametrize(
    ("told", "spec"),
    [
        *(("allow-list", spec) for spec in ("os:system", "builtins:exec", "pickle:loads", "torch.hub:load")),
        *(("allow-list", spec) for spec in ("psc_core.network.load:load_network", "tests.tiny:train")),
        ("allow-list", "tests.tiny:network "),
        *(("package.module:factory", spec) for spec in ("tests.tiny.network", "", ":", "a:", ":b")),
        *(("torchvision", f"torchvision:{name}") for name in ("os.system", "quantization.resnet18", "../resnet18")),
        *(("torchvision", f"torchvision:{name}") for name in ("resnet18\x00", "detection.fcn")),
    ],
)
@pytest.mark.usefixtures("nothing_ran")
def test_rejects_other_networks(bundle: Path, told: str, spec: str) -> None:
    assert told in rejection_of(bundle, spec=spec)


@pytest.mark.parametrize(
    "argument",
    [{"weights": "DEFAULT"}, {"progress": True}, {"norm_layer": "os:system"}, {"stem": ["small"]}, {"in_channels": -1},
     {"zero_init_residual": {"a": 1}}, {"width_per_group": 0}, {"groups": 0}, {"in_channels": "x"}, {"": 1}],
    ids=str,
)  # fmt: skip
@pytest.mark.usefixtures("nothing_ran")
def test_rejects_arguments_that_fail(bundle: Path, argument: dict[str, Any]) -> None:
    rejection_of(bundle, spec="torchvision:resnet18", model_args=argument)


@pytest.mark.usefixtures("nothing_ran")
def test_rejects_timm_arguments_that_load_files(bundle: Path) -> None:
    timm = pytest.importorskip("timm")
    torch.save({"state_dict": Payload()}, "evil.pth")
    Path("evil.pkl").write_bytes(pickle.dumps(Payload()))
    arguments: list[dict[str, Any]] = [
        {"checkpoint_path": "evil.pth"},
        {"checkpoint_path": "evil.pkl"},
        {"pretrained": True},
        {"pretrained_cfg": {"url": "http://127.0.0.1:9/x"}},
        {"pretrained_cfg_overlay": {"file": "evil.pth"}},
        {"cache_dir": "/tmp"},
    ]
    for argument in arguments:
        assert "they read or download files" in rejection_of(bundle, spec="timm:resnet18", model_args=argument)
        with pytest.raises(NetworkError):
            load_network("timm:resnet18", num_classes=2, model_args=argument)
    assert "timm has no network" in rejection_of(bundle, spec="timm:hf_hub:evil/net", model_args={})
    assert timm.is_model("resnet18")


@pytest.mark.parametrize("layer", ["nowhere", "", ".", "2:input:input", "0.weight", "__class__", "2.forward"])
@pytest.mark.parametrize("hooks", [None, {"stop": None, "dropped": []}])
def test_rejects_unknown_layers(bundle: Path, layer: str, hooks: Any) -> None:
    def change(body: dict[str, Any]) -> None:
        body["layers"], body["backbone"]["layers"] = [layer], [layer, *body["backbone"]["layers"][1:]]
        body["backbone"]["hooks"], body["head"]["layers"] = hooks, [layer]

    forge.edit(bundle, change)
    rejection(bundle)


@pytest.mark.parametrize(
    ("stop", "dropped"),
    [
        *(("2", "0"), ("no", "nowhere.at.all"), ("", ""), ("2", "_modules")),
        *(("2", "training"), ("2", "0.weight"), ("2", "0._parameters")),
    ],
)
def test_rejects_wrong_hooks(bundle: Path, stop: str, dropped: str) -> None:
    forge.edit(bundle, lambda body: body["backbone"].update(hooks={"stop": stop, "dropped": [dropped]}))
    rejection(bundle)


MAX_MIB = 512
MAX_SECONDS = 20.0

_CHILD = """
import json, resource, sys, time
from psc_core import PSC
from psc_core.errors import PSCError

def rss():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

PSC.load(sys.argv[1], device="cpu", allow_factories=("tests.tiny:network",))
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (6 << 30),) * 2)
for path in sys.argv[2:]:
    before, start = rss(), time.process_time()
    try:
        PSC.load(path, device="cpu", allow_factories=("tests.tiny:network",))
        answer = "loaded"
    except PSCError as error:
        answer = f"rejected: {error}"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    print(json.dumps([answer, rss() - before, time.process_time() - start]), flush=True)
"""


def _network(spec: str, **model_args: Any) -> Callable[[Path], None]:
    def change(bundle: Path) -> None:
        network = {"spec": spec, "num_classes": 10, "model_args": model_args}
        forge.edit(bundle, lambda body: body["backbone"].update(network=network))

    return change


def _behind_the_cut(bundle: Path) -> None:
    """All stored weights are right; what is too large lies behind the layer and is never stored."""
    network = {"spec": "torchvision:resnet50", "num_classes": 10, "model_args": {"width_per_group": 60_000}}
    forge.edit(bundle, lambda body: body["backbone"].update(network=network, layers=["conv1"]))
    forge.assign(bundle, "layers", ["conv1"])
    forge.replace_part(bundle, "backbone", save({"body.conv1.weight": torch.zeros(64, 3, 7, 7)}))


def _projection(bundle: Path) -> None:
    """Fits the density's promise of dim, and 40 GB of moments."""
    forge.edit(bundle, lambda body: body["projection"].update(channels=100_000, positions=[100_000]))


def _classes(bundle: Path) -> None:
    def change(body: dict[str, Any]) -> None:
        many = 300_000
        body["classes"] = [str(k) for k in range(many)]
        body["backbone"]["network"]["num_classes"] = many
        for part in ("density", "head"):
            body[part]["sizes"]["classes"] = many

    forge.edit(bundle, change)


def _nested(bundle: Path) -> None:
    """Six MiB of empty lists are twenty times that as objects."""
    body = forge.read(bundle)
    text = json.dumps({**body, "provenance": {"x": "HERE"}}).replace('"HERE"', "[" + "[]," * 2_000_000 + "[]]")
    (bundle / "manifest.json").write_text(text)


def _pixels(bundle: Path) -> None:
    forge.edit(bundle, lambda body: body["preprocess"].update(height=30_000, width=30_000))


BOMBS: dict[str, Callable[[Path], None]] = {
    "projection": _projection,
    "classes": _classes,
    "lists": _nested,
    "pixels": _pixels,
    "behind the cut": _behind_the_cut,
    "terabytes": _network("torchvision:resnet18", in_channels=1_000_000_000),
    "width": _network("torchvision:resnet50", width_per_group=20_000),
    "image size": _network("torchvision:vit_b_16", image_size=64_000),
    "embedding": _network("timm:vit_tiny_patch16_224", embed_dim=30_000),
    "blocks": _network("timm:vit_tiny_patch16_224", depth=60_000, embed_dim=3),
    "more blocks": _network("timm:vit_tiny_patch16_224", depth=1_000_000_000, embed_dim=3),
}


def test_memory_bombs(tiny_bundle: Path, tmp_path: Path) -> None:
    pytest.importorskip("timm")
    paths = []
    for name, arm in BOMBS.items():
        paths.append(Path(shutil.copytree(tiny_bundle, tmp_path / name)))
        arm(paths[-1])
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, str(tiny_bundle), *map(str, paths)], cwd=ROOT, capture_output=True, text=True,
        timeout=MAX_SECONDS * len(BOMBS), check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(BOMBS), done.stderr[-2000:]
    for name, (answer, mib, seconds) in zip(BOMBS, answers, strict=True):
        assert answer.startswith("rejected"), f"{name}: {answer}"
        assert mib < MAX_MIB, f"{name}: {mib:.0f} MiB, {answer}"
        assert seconds < MAX_SECONDS, f"{name}: {seconds:.1f} s, {answer}"
        assert "allocate" not in answer, f"{name}: rejected by the machine alone, {answer}"
