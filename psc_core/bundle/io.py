"""The bundle: a directory of ``manifest.json`` and safetensors files; ``docs/bundle-format.md`` specifies it.

Reading verifies everything before anything is used, in this order: the manifest's size, schema and consistency; every
file's place, length and SHA-256; every tensor's dtype and values; the manifest's digest.  Nothing is unpickled, no
code runs, and nothing is allocated for a size that the bundle only claims.  Writing fills a temporary directory and
renames it, and removes the bundle that it replaces once the new files are on the disk, so a bundle is whole or absent,
even after a power cut.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from psc_core.bundle.manifest import (
    GRAPH,
    PARTS,
    SCHEMA,
    FileEntry,
    Manifest,
    check_text,
    inside,
    manifest_digest,
    manifest_of,
)
from psc_core.bundle.refit import fit_command
from psc_core.errors import BundleError, UsageError, fault, shortened

MAX_MANIFEST_BYTES: Final = 16 << 20
"""Maximum size of a manifest in bytes; with 100,000 classes and 1,000 layers it has about 4 MiB."""

MAX_DEPTH: Final = 32
"""Maximum nesting of lists and objects in a manifest."""

TRY_FOLDER: Final = "examples"
"""The folder in a bundle with images to try; no digest covers it."""

MAX_AXES: Final = 8
"""Maximum number of axes of a tensor."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)  # fmt: skip


@dataclass(frozen=True)
class Bundle:
    """A verified bundle in memory."""

    path: Path  # the directory it was read from
    manifest: Manifest
    parts: Mapping[str, Mapping[str, Tensor]]  # the tensors of each part in PARTS, by name
    graph: bytes | None = None  # the ONNX model of the network, instead of its tensors


def is_bundle(path: Path) -> bool:
    """Return whether a folder has a bundle's files, even if they are damaged or of another version."""
    networks = (f"{PARTS[0]}.safetensors", GRAPH)
    return (path / "manifest.json").is_file() and any((path / name).is_file() for name in networks)


def check_target(path: Path, *, overwrite: bool = True) -> None:
    """Check that a bundle can be written to ``path``, before hours are spent on fitting it.

    Args:
        path: The folder, as it was given: what is behind a link is somebody's release, which stays as it is.
        overwrite: Whether a bundle that is there may be replaced.

    Raises:
        BundleError: If ``path`` is a link, a file or a mount point, holds files that are not a bundle's, or its parent
            is not writable.
        UsageError: If it holds a bundle that may not be replaced.
    """
    if path.is_symlink():
        raise BundleError(
            f"cannot write a bundle to {path}, it is a link to {path.readlink()}, which stays as it is; write to "
            f"another folder, then let the link point there: ln -sfn FOLDER {path}"
        )
    if path.exists() and not path.is_dir():
        raise BundleError(f"cannot write a bundle to {path}, it is a file; choose another place")
    if path.is_mount():
        raise BundleError(f"cannot replace {path}, it is a mount point; choose a folder inside it")
    if path.exists() and any(path.iterdir()) and not is_bundle(path):
        raise BundleError(f"cannot write a bundle to {path}, it holds other files; choose another place")
    if not overwrite and is_bundle(path):
        raise UsageError(f"{path} holds a bundle already; give --overwrite to replace it, or another --out")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise BundleError(f"cannot write to {path.parent}: {error.strerror}; choose another place") from error


def write_bundle(
    path: Path, fields: Mapping[str, Any], parts: Mapping[str, Mapping[str, Tensor]], graph: bytes | None = None
) -> Manifest:
    """Write a bundle to the directory ``path`` and replace one that is there; its other files and folders stay.

    Equal input gives equal bytes.

    Args:
        fields: The manifest without ``version`` and ``files``, which are computed here.
        parts: The tensors by the name of the part, one of :data:`PARTS`.
        graph: The ONNX model of the network, instead of its tensors.

    Raises:
        BundleError: If ``path`` is a link, exists and is not a bundle, or cannot be replaced, or if a manifest cannot
            hold a number or text.
    """
    check_target(path)
    blobs = {f"{part}.safetensors": _serialise(tensors) for part, tensors in parts.items()}
    if graph is not None:
        blobs[GRAPH] = graph
    files = {name: {"bytes": len(blob), "sha256": hashlib.sha256(blob).hexdigest()} for name, blob in blobs.items()}
    body = json.loads(json.dumps({**fields, "files": files}))
    try:
        check_text(body)
    except ValueError as error:
        raise BundleError(f"a manifest cannot hold this model's description: {error}") from error
    body["version"] = manifest_digest(body)
    manifest = manifest_of(body)
    ordered = {name: body[name] for name in sorted(body, key=_place)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, blob in blobs.items():
            write_file(scratch / name, blob)
        write_file(scratch / "manifest.json", (json.dumps(ordered, indent=1) + "\n").encode())
        scratch.chmod(0o755)
        _sync_folder(scratch)
        _put(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest


def _put(scratch: Path, path: Path) -> None:
    """Rename a filled folder to ``path``; if that fails, put the bundle that was there back."""
    retired = path.with_name(f"{scratch.name}.old")
    try:
        if not path.exists():
            scratch.rename(path)
            return
        path.rename(retired)
        try:
            scratch.rename(path)
        except BaseException:
            retired.rename(path)
            raise
        ours = {"manifest.json", GRAPH, *(f"{part}.safetensors" for part in PARTS)}
        for kept in retired.iterdir():
            if kept.name not in ours:
                kept.rename(path / kept.name)
        _sync_folder(path)
        _sync_folder(path.parent)
        shutil.rmtree(retired)
    except OSError as error:
        left = f", its former content is in {retired}" if retired.exists() else ""
        raise BundleError(f"cannot replace {path} ({error.strerror}){left}; choose another place") from error


def write_file(file: Path, data: bytes) -> None:
    """Write a whole file and flush it to the disk.

    Raises:
        BundleError: If it cannot be written; the message says where and what to do.
    """
    try:
        with file.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise BundleError(
            f"cannot write {len(data)} bytes to {file.parent} ({error.strerror}); free space there or choose "
            "another place"
        ) from error


def _sync_folder(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    with suppress(OSError):  # some network file systems, and Windows, cannot do it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    """Serialise tensors; copy those that share memory, because a module may have two names."""
    stored: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        storage = tensor.untyped_storage().data_ptr()
        stored[name] = tensor.clone() if storage in seen else tensor
        seen.add(storage)
    return save_tensors(stored)


def _parse_manifest(path: Path) -> tuple[Manifest, str]:
    """Return the manifest, and the version computed from its content."""
    file = path / "manifest.json"
    if not file.exists():
        raise BundleError(f"{path} is not a bundle, it has no manifest.json; make one with psc-fit")
    text = _read_file(path, file.name, MAX_MANIFEST_BYTES)
    try:
        body = json.loads(text.decode(), object_pairs_hook=_reject_duplicates)
        if _deeper_than(body, MAX_DEPTH):
            raise RecursionError
        check_text(body)
    except RecursionError as error:
        raise BundleError(f"{file}: expected at most {MAX_DEPTH} levels of nesting; fit the bundle again") from error
    except ValueError as error:
        raise BundleError(f"{file}: expected JSON, {error}; fit the bundle again or restore it") from error
    if isinstance(body, dict) and repr(body.get("schema_version")) != str(SCHEMA):  # 5.0 is not 5
        raise BundleError(
            f"{file}: expected schema_version {SCHEMA}, got {shortened(repr(body.get('schema_version')))}; fit the "
            f"bundle again: {fit_command(body)}"
        )
    try:
        return manifest_of(body), manifest_digest(body)
    except ValidationError as error:
        raise BundleError(f"{file}: {fault(error.errors()[0], 'field')}; fit the bundle again") from error
    except UsageError as error:
        raise BundleError(f"{file}: field preprocess: {error}; fit the bundle again") from error
    except BundleError as error:
        raise BundleError(f"{file}: {error}") from error


def _place(field: str) -> tuple[int, str]:
    """Return the position of a field in the file; fields that a task adds follow the version."""
    names = list(Manifest.model_fields)
    return (names.index(field), "") if field in names else (names.index("version"), field)


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shortened(repr(name))} twice in one object")
    return body


def _deeper_than(value: Any, levels: int) -> bool:
    return any(levels == 0 or _deeper_than(item, levels - 1) for item in inside(value))


def read_bundle(path: Path) -> Bundle:
    """Read and verify a whole bundle.

    Raises:
        BundleError: If anything is missing, unexpected, altered, damaged or not finite; the message names it.
    """
    manifest, version = _parse_manifest(path)
    graph: bytes | None = None
    parts: dict[str, Mapping[str, Tensor]] = {}
    for name, entry in manifest.files.items():
        blob = _read_entry(path, name, entry)
        if name == GRAPH:
            graph = blob
        else:
            parts[name.removesuffix(".safetensors")] = _tensors_of(path / name, blob)
    if manifest.version != version:
        raise BundleError(
            f"{path}: expected version {version}, the digest of manifest.json, it says "
            f"{manifest.version}; the manifest was edited, copy the bundle again"
        )
    return Bundle(path, manifest, parts, graph)


def _read_file(folder: Path, name: str, limit: int) -> bytes:
    """Return the content of a regular file inside ``folder``, of at most ``limit`` bytes."""
    file = folder / name
    try:
        if not file.resolve(strict=True).is_relative_to(folder.resolve(strict=True)):
            raise BundleError(f"{file}: this is a link to elsewhere; put a copy there")
        if not file.is_file():  # devices and pipes have no end
            raise BundleError(f"{file}: expected a regular file; copy the bundle again")
        size = file.stat().st_size
        if size > limit:
            raise BundleError(f"{file}: expected at most {limit} bytes, got {size}; copy the bundle again")
        with file.open("rb") as stream:
            return stream.read(size)
    except (OSError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise BundleError(f"{file}: cannot be read ({reason}); copy the bundle again") from error


def _read_entry(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Return the content of a file if it is as the manifest describes it."""
    file = folder / name
    blob = _read_file(folder, name, entry.bytes)
    if len(blob) != entry.bytes:
        raise BundleError(f"{file}: expected {entry.bytes} bytes, got {len(blob)}; copy the bundle again")
    digest = hashlib.sha256(blob).hexdigest()
    if digest != entry.sha256:
        raise BundleError(
            f"{file}: expected SHA-256 {entry.sha256[:12]}…, got {digest[:12]}…; the file was altered "
            "or damaged, copy the bundle again"
        )
    return blob


def _tensors_of(file: Path, blob: bytes) -> dict[str, Tensor]:
    try:
        header = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
        json.loads(header.decode(), object_pairs_hook=_reject_duplicates)  # readers may keep either duplicate
        tensors: dict[str, Tensor] = load_tensors(blob)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{file}: expected safetensors, {str(error)[:200]}; fit the bundle again") from error
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.ndim > MAX_AXES:
            raise BundleError(
                f"{file}: tensor {shortened(repr(key))} has the type {tensor.dtype} and {tensor.ndim} axes, which "
                "no bundle holds; fit it again"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BundleError(f"{file}: tensor {shortened(repr(key))} has NaN or infinite values; fit the bundle again")
    return tensors
