"""Hostile files: links, devices, pipes, and safetensors headers that lie."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save

from psc_core import PSC
from psc_core.bundle import PARTS, read_bundle
from psc_core.errors import BundleError
from tools import forge

needs_unix = pytest.mark.skipif(sys.platform == "win32", reason="no such files")


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    start = time.process_time()
    yield
    assert time.process_time() - start < 5.0


@needs_unix
@pytest.mark.parametrize("name", ["manifest.json", "head.safetensors"])
def test_rejects_links_out_of_the_bundle(bundle: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    shutil.move(bundle / name, outside)
    (bundle / name).symlink_to(outside)
    with pytest.raises(BundleError, match=rf"{name}: .*link to elsewhere"):
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
    reason = {"device": "link to elsewhere", "pipe": "regular file", "folder": "regular file"}.get(kind)
    told = rf"{name}: .*{reason}" if reason else rf"{name}: cannot be read|it has no {name}"
    with pytest.raises(BundleError, match=told):
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
    with pytest.raises(BundleError) as caught:
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
    assert len(str(caught.value)) < 2000


def change_tensor(bundle: Path, part: str, change: Any) -> None:
    tensors = load_file(bundle / f"{part}.safetensors")
    changed = {name: change(tensor).contiguous() for name, tensor in tensors.items()}
    forge.replace_part(bundle, part, save(changed))


OTHER_TYPE = {
    "backbone": r"expected body\.\S+ of type torch\.float32, got ",
    "projection": r"expected torch\.float32 for tucker\.\w+, got ",
    "density": r"expected torch\.float(32|64) for pooled\+\+\.\w+, got ",
    "head": r"expected torch\.float32 for laplace\.\w+, got ",
    "calibration": "expected .* float32 calibration scores",
    "checks": r"expected (torch\.float(32|64) for gda\.\w+|float32 checks\.\w+ of \d checks), got ",
    "map": r"expected torch\.float(32|64) for gaussian\.\w+, got ",
    "stored_images": r"expected torch\.\w+ stored_images\.\w+ with axes .* got ",
}
OTHER_SHAPE = {
    "backbone": r"backbone: expected body\.\S+ of shape ",
    "projection": r"expected tucker\.\w+ with axes .* got shape ",
    "density": r"expected pooled\+\+\.\w+ with axes .* got shape ",
    "head": r"expected laplace\.\w+ with axes .* got shape ",
    "calibration": "calibration scores of one length|one int64 num_classes",
    "checks": r"expected (gda\.\w+ with axes .* got shape |float32 checks\.\w+ of \d checks, got )",
    "map": r"expected (gaussian\.\w+ with axes .* got shape |tensors of 'gaussian' with sizes )",
    "stored_images": r"expected torch\.\w+ stored_images\.\w+ with axes .* got ",
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.int64, torch.complex64], ids=str)
def test_rejects_other_tensor_types(bundle: Path, part: str, dtype: torch.dtype) -> None:
    change_tensor(bundle, part, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor.float())
    told = rf"{part}\.safetensors: tensor .* torch\.complex64" if dtype.is_complex else OTHER_TYPE[part]
    with pytest.raises(BundleError, match=told):
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (1, 1, 1, 1, 1)], ids=str)
def test_rejects_other_tensor_shapes(bundle: Path, part: str, shape: tuple[int, ...]) -> None:
    change_tensor(bundle, part, lambda tensor: torch.zeros(shape, dtype=tensor.dtype))
    with pytest.raises(BundleError, match=OTHER_SHAPE[part]):
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)


@pytest.mark.parametrize("part", ["backbone", "projection", "density", "head"])
def test_rejects_values_that_overflow(bundle: Path, part: str) -> None:
    largest = float(np.finfo(np.float32).max)
    change_tensor(bundle, part, lambda tensor: torch.full_like(tensor, largest))
    with pytest.raises(BundleError, match="finite features and outputs"):
        PSC.load(bundle, device="cpu", allow_factories=forge.ALLOW)
