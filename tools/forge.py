"""Forging bundles: what somebody who has read ``docs/bundle-format.md`` can write."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load, save
from torch import Tensor

ALLOW = ("tests.tiny:network",)  # The allow-list of the operator under attack

Edit = Callable[[dict[str, Any]], object]


def read(bundle: Path) -> dict[str, Any]:
    """The manifest as JSON."""
    body: dict[str, Any] = json.loads((bundle / "manifest.json").read_text())
    return body


def write(bundle: Path, body: dict[str, Any]) -> None:
    """Write a manifest with the version that its content has."""
    body.pop("version", None)
    body["version"] = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    (bundle / "manifest.json").write_text(json.dumps(body))


def edit(bundle: Path, change: Edit) -> None:
    """Change the manifest and keep its digest right."""
    body = read(bundle)
    change(body)
    write(bundle, body)


def assign(bundle: Path, where: str, value: Any) -> None:
    """Set one field, named by its keys with dots between."""
    *steps, last = where.split(".")

    def change(body: dict[str, Any]) -> None:
        for step in steps:
            body = body[step]
        body[last] = value

    edit(bundle, change)


def replace_part(bundle: Path, part: str, blob: bytes) -> None:
    """Replace a tensor file and keep its length and digest right."""
    name = f"{part}.safetensors"
    (bundle / name).write_bytes(blob)
    entry = {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()}
    edit(bundle, lambda body: body["files"].update({name: entry}))


def edit_part(bundle: Path, part: str, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Change the tensors of a part in place and keep the manifest right."""
    tensors = load((bundle / f"{part}.safetensors").read_bytes())
    change(tensors)
    replace_part(bundle, part, save(tensors))


def safetensors(header: Mapping[str, Any] | bytes, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A safetensors file with any header, and any claim of the header's length."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[Any], start: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    """One tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
