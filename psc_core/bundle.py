"""The bundle: a directory of ``manifest.json`` and safetensors files; ``docs/bundle-format.md`` specifies it.

Reading verifies, in this order and before anything is used: the manifest's size and schema, the list of
files, every file's length and SHA-256, every tensor's finiteness.  Nothing is unpickled and no code runs.
Writing goes to a temporary directory that replaces the target in one rename, so a bundle is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from psc_core.errors import BundleError

SCHEMA: Final = 1
"""Version of the bundle format; a reader refuses any other."""

PARTS = ("backbone", "projection", "density", "head", "calibration")
"""Tensor files a bundle may have; ``head`` is absent for base predictions."""

MAX_MANIFEST_BYTES = 64 << 20


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class FileEntry(_Strict):
    """Length and digest of one file."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Policy(_Strict):
    """Default decision thresholds.

    Attributes:
        alpha: An image is OOD when its p-value is at most this.
        ambiguity_threshold: An image is ambiguous when its predictive entropy (nats) exceeds this.
        coverage: Nominal coverage of the prediction sets.
    """

    alpha: float = Field(gt=0, lt=1)
    ambiguity_threshold: float = Field(ge=0)
    coverage: float = Field(gt=0, lt=1)


class Manifest(_Strict):
    """``manifest.json``; every field is described in ``docs/bundle-format.md``."""

    schema_version: Literal[1] = SCHEMA
    name: str = Field(min_length=1, max_length=200)
    version: str = Field(pattern="^[0-9a-f]{12}$")
    classes: tuple[str, ...] = Field(min_length=2)
    preprocess: dict[str, Any]
    precision: Literal["fp32", "bf16"]
    predictions: Literal["psc", "base"]
    layers: tuple[str, ...] = Field(min_length=1)
    policy: Policy
    backbone: dict[str, Any]
    projection: dict[str, Any]
    density: dict[str, Any]
    head: dict[str, Any] | None
    calibration: dict[str, Any]
    collapse: dict[str, Any] | None
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory.

    Attributes:
        manifest: The checked manifest.
        parts: Tensors of each part, by name.
    """

    manifest: Manifest
    parts: Mapping[str, Mapping[str, Tensor]]


def write_bundle(path: Path, fields: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]]) -> Manifest:
    """Write ``parts`` and a manifest of ``fields`` to the directory ``path``, replacing a bundle there.

    Args:
        path: Directory to write.
        fields: The manifest without ``version`` and ``files``, which are computed here.
        parts: Tensors by part name, a subset of :data:`PARTS`.

    Returns:
        The manifest as written.  Equal input gives equal bytes.

    Raises:
        BundleError: ``path`` exists and is not a bundle.
    """
    if path.exists() and any(path.iterdir()) and not (path / "manifest.json").exists():
        raise BundleError(f"expected {path} to be new, empty or a bundle, it holds other files; choose another")
    blobs = {f"{part}.safetensors": _serialise(tensors) for part, tensors in parts.items()}
    files = {name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for name, blob in blobs.items()}
    body = json.loads(json.dumps({**fields, "schema_version": SCHEMA, "files": files}))
    version = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
    manifest = Manifest.model_validate({**body, "version": version})
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, blob in blobs.items():
            (scratch / name).write_bytes(blob)
        (scratch / "manifest.json").write_text(json.dumps(manifest.model_dump(mode="json"), indent=1) + "\n")
        scratch.chmod(0o755)
        if path.exists():
            for kept in path.iterdir():
                if kept.suffix != ".safetensors" and kept.name != "manifest.json" and kept.is_file():
                    shutil.copy2(kept, scratch / kept.name)
            retired = path.with_name(f"{scratch.name}.old")
            path.rename(retired)
            scratch.rename(path)
            shutil.rmtree(retired)
        else:
            scratch.rename(path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})


def read_manifest(path: Path) -> Manifest:
    """Read and check ``manifest.json`` alone.

    Raises:
        BundleError: Missing, too large, not JSON, another schema, or a field out of place.
    """
    file = path / "manifest.json"
    try:
        size = file.stat().st_size
        if size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{file}: expected at most {MAX_MANIFEST_BYTES} bytes, got {size}")
        body = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise BundleError(f"expected a bundle at {path}, it has no manifest.json; make one with psc-fit") from None
    except (OSError, ValueError) as error:
        raise BundleError(f"{file}: expected JSON, {error}; fit the bundle again or restore it") from error
    if isinstance(body, dict) and body.get("schema_version") != SCHEMA:
        raise BundleError(f"{file}: expected schema_version {SCHEMA}, got {body.get('schema_version')!r}; use the "
                          "release that wrote it or fit again")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        raise BundleError(f"{file}: field {where!r}: {first['msg']}; fit the bundle again") from error


def read_bundle(path: Path) -> Bundle:
    """Read and verify a whole bundle.

    Raises:
        BundleError: Anything that is missing, extra, altered, damaged or not finite, by name.
    """
    manifest = read_manifest(path)
    allowed = {f"{part}.safetensors" for part in PARTS}
    if not set(manifest.files) <= allowed:
        raise BundleError(f"{path}: expected files among {sorted(allowed)}, the manifest names "
                          f"{sorted(set(manifest.files) - allowed)}")
    required = set(PARTS) - ({"head"} if manifest.head is None else set())
    missing = sorted(required - {name.removesuffix(".safetensors") for name in manifest.files})
    if missing:
        raise BundleError(f"{path}: expected the parts {sorted(required)}, the manifest lacks {missing}")
    parts = {name.removesuffix(".safetensors"): _read_part(path / name, entry)
             for name, entry in manifest.files.items()}
    return Bundle(manifest, parts)


def _read_part(file: Path, entry: FileEntry) -> dict[str, Tensor]:
    try:
        size = file.stat().st_size
        if size != entry.bytes:
            raise BundleError(f"{file}: expected {entry.bytes} bytes, got {size}; copy the bundle again")
        blob = file.read_bytes()
    except OSError as error:
        raise BundleError(f"{file}: cannot be read ({error.strerror}); copy the bundle again") from error
    digest = hashlib.sha256(blob).hexdigest()
    if digest != entry.sha256:
        raise BundleError(f"{file}: expected SHA-256 {entry.sha256[:12]}…, got {digest[:12]}…; the file was altered "
                          "or damaged, copy the bundle again")
    try:
        tensors: dict[str, Tensor] = load_tensors(blob)
    except SafetensorError as error:
        raise BundleError(f"{file}: expected safetensors, {error}") from error
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BundleError(f"{file}: tensor {name!r} has NaN or infinite values; fit the bundle again")
    return tensors
