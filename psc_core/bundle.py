"""The bundle: a directory of ``manifest.json`` and safetensors files, as ``docs/bundle-format.md`` specifies it.

People paste the ``psc-fit`` command that refits a bundle of another version into a shell: it repeats plain words only.

Writing fills a temporary directory and renames it, and removes the bundle that it replaces once the new files are on
the disk, so a bundle is whole or absent, even after a power cut.  Reading verifies everything before anything is used,
in this order: the manifest's size, schema and consistency; every file's place, length and SHA-256; every tensor's dtype
and values; the manifest's digest.  Nothing is unpickled, no code runs, and nothing is allocated for a size that the
bundle only claims.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from psc_core.answers import UNNAMED, BasePolicy
from psc_core.errors import BundleError, UsageError, fault, shorten, why_no_bundle
from psc_core.images.preprocess import Preprocess
from psc_core.network import LIBRARIES
from psc_core.settings import Precision, settings_where
from psc_core.tasks import TASKS, task_of_manifest
from psc_core.tasks.base import Agreement, Task
from psc_core.text import compose

SCHEMA: Final = 7  # the version of the bundle format, the only one that is written and read
OPTIONAL: Final = ("checks", "map", "stored_images")  # parts without which the manifest has no such section
PARTS: Final = ("backbone", "projection", "density", "head", "calibration", *OPTIONAL)  # tensor files, without suffix
MAX_PART_BYTES: Final = 16 << 30  # maximum size of a tensor file, in bytes
GRAPH: Final = "backbone.onnx"  # the file for a network that no name can build, instead of its tensors
FILES: Final = ("manifest.json", GRAPH, *(f"{part}.safetensors" for part in PARTS))  # all that a bundle may consist of
CONTENT: Final = "report.safetensors"  # what the report shows
CARD: Final = "README.md"
REPORT: Final = ("report.html", CONTENT, CARD)  # what stands beside a bundle and names its version
HISTORY: Final = "recalibrations"  # in a bundle's provenance: its recalibrations, the oldest first
MAX_NAME: Final = 200  # maximum length of a model name, in characters
MAX_ARGUMENT: Final = 1 << 16  # maximum magnitude of a number among a network's arguments, which are sizes and counts
_Size = Annotated[int, Field(ge=1, le=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True, serialize_by_alias=True)


class FileEntry(_Strict):
    bytes: int = Field(ge=0, le=MAX_PART_BYTES)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Network(_Strict):
    spec: str
    num_classes: _Size
    model_args: dict[str, Any]

    @model_validator(mode="after")
    def _modest(self) -> _Network:
        if any(isinstance(value, int | float) and abs(value) > MAX_ARGUMENT for value in leaves(self.model_args)):
            raise ValueError(
                f"expected model_args of numbers up to {MAX_ARGUMENT}, got {shorten(repr(self.model_args))}"
            )
        return self


class _Hooks(_Strict):
    stop: str | None
    dropped: list[str]


class _Backbone(_Strict):
    network: _Network | None
    layers: list[str]
    keep_output: bool
    hooks: _Hooks | None
    tokens_first: list[str] = []


class _Projection(_Strict):
    method: Literal["tucker"]
    positions: list[_Size]
    channels: _Size
    c_proj: _Size
    d_proj: _Size


class _FittedSection(_Strict):
    kind: str
    sizes: dict[str, _Size]
    record: dict[str, float | int]


class _ReadingSection(_FittedSection):
    layers: list[str] = []


class _Calibration(_Strict):
    images: _Size


class _Texture(_Strict):
    layer: str
    density: _FittedSection
    counts_below: float = Field(gt=0, le=1)


class _Kind(_Strict):
    name: str = Field(min_length=1, max_length=MAX_NAME)
    images: _Size
    day: str | None = Field(pattern=r"^\d{4}-\d{2}-\d{2}$")


class StoredImagesSection(_Strict):
    count: _Size
    kept: _Size
    channels: _Size
    height: _Size
    width: _Size


class ReviewedSection(_Strict):
    kinds: list[_Kind] = Field(min_length=1)
    counts_below: float = Field(gt=0, le=1)
    stored_images: StoredImagesSection | None = None


class _Checks(_Strict):
    names: list[str] = Field(min_length=1)
    images: _Size
    texture: _Texture | None
    reviewed: ReviewedSection | None = None


class _AddedClass(_Strict):
    images: _Size
    slope: float = Field(gt=0)
    bias: float


class _Grid(_Strict):
    rows: _Size
    columns: _Size
    first: int = Field(ge=0)


class MapSection(_Strict):
    layer: str
    grid: _Grid
    density: _FittedSection


def check_network(network: Mapping[str, Any]) -> None:
    """Check, before anything is fitted, that a manifest can describe a network, given the fields of its spec."""
    try:
        check_text(network)
        _Network.model_validate_json(json.dumps(network))
    except ValidationError as error:
        raise UsageError(fault(error.errors()[0], "field")) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected numbers and text that JSON can hold: {error}") from error


class Manifest(_Strict):
    """The content of ``manifest.json``, see ``docs/bundle-format.md``; a subclass adds the fields of its task."""

    task_type: ClassVar[type[Task]]

    schema_version: Literal[7]
    task_name: str = Field(alias="task")
    name: str = Field(min_length=1, max_length=MAX_NAME)
    version: str = Field(pattern="^[0-9a-f]{12}$")
    classes: tuple[str, ...] = Field(min_length=2)
    added_classes: list[_AddedClass] = []
    preprocess: Preprocess
    precision: Precision
    predictions: Literal["psc", "original"]
    layers: tuple[str, ...] = Field(min_length=1)
    policy: BasePolicy
    backbone: _Backbone
    projection: _Projection
    density: _ReadingSection
    head: _ReadingSection
    calibration: _Calibration
    checks: _Checks | None = None
    map: MapSection | None = None
    stored_images: StoredImagesSection | None = None
    collapse: dict[str, Any] | None
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]

    @field_validator("classes")
    @classmethod
    def _compose(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(compose, classes))

    @model_validator(mode="after")
    def _check_agreement(self) -> Manifest:
        head, classes = self.head, len(self.classes)
        beside_z = [*head.layers, *self.density.layers]
        dim = self.projection.c_proj * self.projection.d_proj
        texture = None if self.checks is None else self.checks.texture
        reviewed, names = (self.checks.reviewed, self.checks.names) if self.checks else (None, ())
        last_layer = texture.layer if texture else None
        map_layer = None if self.map is None else self.map.layer
        of_texture = texture.density.sizes if texture else {"classes": classes}
        without = {part for part in OPTIONAL if getattr(self, part) is None}
        needed = {f"{part}.safetensors" for part in PARTS if part not in without}
        network, first = self.backbone.network, self.backbone.tokens_first
        if network is None:
            needed = {GRAPH, *needed} - {f"{PARTS[0]}.safetensors"}
        outputs = self.task.network_outputs(self.network_classes)
        agreements: tuple[Agreement, ...] = (
            ("files", sorted(needed), sorted(self.files)),
            *self.task.agreements(self),
            ("backbone.keep_output", self.predictions == "original", self.backbone.keep_output),
            ("backbone.layers", layers_of(self.layers, beside_z, last_layer, map_layer), self.backbone.layers),
            ("backbone.tokens_first", [n for n in self.backbone.layers if n in first], first),
            ("backbone.network.num_classes", outputs, outputs if network is None else network.num_classes),
            ("backbone.hooks", None, None if network is not None else self.backbone.hooks),
            ("projection.positions (their number)", len(self.layers), len(self.projection.positions)),
            ("density.sizes.classes", classes, self.density.sizes.get("classes")),
            ("checks.texture.density.sizes.classes", classes, of_texture.get("classes", 0)),
            ("checks.names (texture)", texture is not None, "texture" in names),
            ("checks.names (reviewed)", reviewed is not None, "reviewed" in names),
            ("head.sizes.dim", dim, dim if head.layers or "dim" not in head.sizes else head.sizes["dim"]),
        )
        for where, expected, got in agreements:
            if expected != got:
                raise ValueError(f"expected {where} to be {shorten(repr(expected))}, got {shorten(repr(got))}")
        if self.added_classes and (len(self.network_classes) < 2 or not self.task.probabilities(self.classes)):
            raise ValueError(f"expected no added_classes beside {len(self.network_classes)} classes of the network")
        if len(set(self.classes)) != classes:
            raise ValueError("expected class names that differ from each other")
        return self

    @property
    def network_classes(self) -> tuple[str, ...]:
        """The classes that the network was trained on: all but the added ones, which are the last."""
        return self.classes[: len(self.classes) - len(self.added_classes)]

    @property
    def task(self) -> Task:
        """The task of the model, with its fields of the manifest."""
        return self.task_type.model_validate({name: getattr(self, name) for name in self.task_type.model_fields})


def manifest_of(body: Any) -> Manifest:
    """Check a manifest, given as JSON types, with the fields of the task that it is for."""
    if not isinstance(body, dict):
        return Manifest.model_validate(body)
    if (found := task_of_manifest(body)) is None:
        raise BundleError(
            f"expected field task to be one of {', '.join(TASKS)}, got {shorten(repr(body.get('task')))}; use a "
            "newer version of psc"
        )
    return _manifest_type(found).model_validate_json(json.dumps(body))


@cache
def _manifest_type(task: type[Task]) -> type[Manifest]:
    of_task: dict[str, Any] = {name: (field.annotation, field) for name, field in task.model_fields.items()}

    class OfTask(Manifest):
        task_type = task

    return create_model("Manifest", __base__=OfTask, policy=(task.policy_type, ...), **of_task)


def layers_of(
    chosen: Sequence[str], beside_z: Sequence[str], texture: str | None, map_layer: str | None = None
) -> list[str]:
    """Return ``backbone.layers``: the chosen, the other ones of head, density and map, and last the texture's layer."""
    last = [] if texture is None else [texture]
    others = [*beside_z, *([] if map_layer is None else [map_layer])]
    return list(dict.fromkeys([*chosen, *(name for name in others if name not in last), *last]))


def check_text(body: object) -> None:
    """Reject lone surrogates, as in an undecodable file name: JSON can escape them, but UTF-8 cannot encode them."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"text that UTF-8 cannot hold, {text[max(0, error.start - 40) : error.end]!r}") from error


def manifest_digest(body: Mapping[str, Any]) -> str:
    """Return the ``version`` of a manifest: the first 12 hexadecimal digits of a SHA-256 over all other fields."""
    others = {key: value for key, value in body.items() if key != "version"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:12]


def inside(value: Any) -> Iterable[Any]:
    """Return the values of a JSON list or object; none for any other value."""
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def leaves(value: Any) -> Iterable[Any]:
    """Yield the values of a JSON document that are neither lists nor objects."""
    if not isinstance(value, dict | list):
        yield value
    for item in inside(value):
        yield from leaves(item)


_MAX_REPEATED: Final = 1000  # maximum length of the repeated settings, in characters
_LIBRARY_NETWORK: Final = re.compile(rf"({'|'.join(LIBRARIES)}):[A-Za-z0-9_.-]+")
_OWN_WEIGHTS: Final = {"hf": "hf:DIR", "onnx": "onnx:FILE"}  # specs of networks that bring their weights
_FILES: Final = {"hf:DIR": "", "onnx:FILE": "--preprocess FILE "}  # an ONNX file describes no preprocessing
_PLAIN: Final = re.compile(r"[A-Za-z0-9_+.:][A-Za-z0-9_+.:-]*")


def fit_command(body: Mapping[str, Any]) -> str:
    """Return the ``psc-fit`` command that refits a bundle, with the recorded settings if all are plain words."""
    try:
        flags = _repeated(body["provenance"]) + _of_target(body.get("target"))
    except (AttributeError, KeyError, TypeError, ValueError):
        flags = "--model SPEC"
    files = _FILES.get(flags.split()[1], "--weights FILE --preprocess FILE ")
    return f"psc-fit {flags} {files}--train DIR --val DIR --out DIR"


def _repeated(provenance: Any) -> str:
    model = provenance["model"]
    spec = model if _LIBRARY_NETWORK.fullmatch(model) else _OWN_WEIGHTS.get(model.partition(":")[0], "SPEC")
    words = ["--model", spec]
    for name, value in provenance["model_args"].items():
        words += ["--model-arg", f"{_plain(name)}={_plain(value)}"]
    for name in settings_where(of_machine=False):
        value = provenance["settings"].get(name)
        if value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", *([] if value is True else [_plain(value)])]
    if len(line := " ".join(words)) > _MAX_REPEATED:
        raise ValueError(f"{len(line)} characters")
    return line


def _of_target(target: Any) -> str:
    """Return the flags of a regression's column and unit; a name that is no plain word is left to the user."""
    if not isinstance(target, dict):
        return ""
    words = {name: str(target.get(key) or "") for name, key in (("target", "name"), ("unit", "unit"))}
    told = {name: text for name, text in words.items() if text not in ("", UNNAMED.name)}
    return "".join(f" --{name} {text if _PLAIN.fullmatch(text) else name.upper()}" for name, text in told.items())


def _plain(value: Any) -> str:
    """Return a JSON value as a word that needs no quoting in a shell, or raise :class:`ValueError`."""
    text = value if isinstance(value, str) else json.dumps(value)
    if not _PLAIN.fullmatch(text):
        raise ValueError(shorten(repr(text)))
    return text


MAX_MANIFEST_BYTES: Final = 16 << 20  # 100,000 classes and 1,000 layers take about 4 MiB
MAX_DEPTH: Final = 32  # maximum nesting of lists and objects in a manifest
TRY_FOLDER: Final = "examples"  # the folder in a bundle with images to try; no digest covers it
MAX_AXES: Final = 8  # maximum number of axes of a tensor

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
    """Check that a bundle can be written to ``path``; what is behind a link is somebody's release, and stays."""
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
    """Write a bundle, the same bytes for equal input.

    Of one that it replaces other files and folders stay, but for the report of another version.
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
    names = list(Manifest.model_fields)  # fields that a task adds follow the version
    place = {name: (names.index(name if name in names else "version"), name not in names, name) for name in body}
    ordered = {name: body[name] for name in sorted(body, key=place.__getitem__)}
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        for name, blob in blobs.items():
            write_file(scratch / name, blob)
        write_file(scratch / "manifest.json", (json.dumps(ordered, indent=1) + "\n").encode())
        scratch.chmod(0o755)  # The files follow the umask: some are made of training images.
        _sync_folder(scratch)
        _put(scratch, path)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return manifest


def _put(scratch: Path, path: Path) -> None:
    """Put a filled folder at ``path``; if that fails, put the bundle that was there back.

    On Linux the two are exchanged.  Where the file system cannot do that, there is no bundle for a moment.
    """
    retired = path.with_name(f"{scratch.name}.old")
    try:
        if not path.exists():
            scratch.rename(path)
            return
        scratch.rename(retired)  # If this ends between here and the loop, nobody deletes what is the old bundle then.
        if not _exchange(retired, path):
            retired.rename(scratch)
            path.rename(retired)
            try:
                scratch.rename(path)
            except BaseException:
                retired.rename(path)
                raise
        before = _version_of(retired)
        is_other = before not in ("", _version_of(path))
        for kept in retired.iterdir():
            is_stale = is_other and kept.name in REPORT and before.encode() in kept.read_bytes()
            if kept.name not in FILES and not is_stale:  # A user's own README stays.
                kept.rename(path / kept.name)
        _sync_folder(path)
        _sync_folder(path.parent)
        shutil.rmtree(retired)
    except OSError as error:
        left = f", its former content is in {retired}" if retired.exists() else ""
        raise BundleError(f"cannot replace {path} ({error.strerror}){left}; choose another place") from error


def _version_of(folder: Path) -> str:
    """Return the version that a bundle states; "" if its manifest cannot be read."""
    try:
        return str(json.loads((folder / "manifest.json").read_bytes())["version"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step, so that neither path is ever empty; return whether the system can do that."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:  # a C library without it
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return bool(rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0)


def write_file(file: Path, data: bytes) -> None:
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


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files, in place of those that are there, so that each is whole or as it was; no link is followed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as scratch:
        for name, data in files.items():
            write_file(Path(scratch) / name, data)
        for name in files:
            (Path(scratch) / name).replace(folder / name)


def _sync_folder(folder: Path) -> None:
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
    if reason := why_no_bundle(path):
        raise BundleError(reason)
    text = read_inside(path, file.name, MAX_MANIFEST_BYTES)
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
            f"{file}: expected schema_version {SCHEMA}, got {shorten(repr(body.get('schema_version')))}; fit the "
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


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    body = dict(pairs)
    if len(body) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the name {shorten(repr(name))} twice in one object")
    return body


def _deeper_than(value: Any, levels: int) -> bool:
    return any(levels == 0 or _deeper_than(item, levels - 1) for item in inside(value))


def read_bundle(path: Path) -> Bundle:
    manifest, version = _parse_manifest(path)
    graph: bytes | None = None
    parts: dict[str, Mapping[str, Tensor]] = {}
    for name, entry in manifest.files.items():
        blob = _read_entry(path, name, entry)
        if name == GRAPH:
            graph = blob
        else:
            parts[name.removesuffix(".safetensors")] = tensors_of(path / name, blob)
    if manifest.version != version:
        raise BundleError(
            f"{path}: expected version {version}, the digest of manifest.json, it says "
            f"{manifest.version}; the manifest was edited, copy the bundle again"
        )
    return Bundle(path, manifest, parts, graph)


def _homes(folder: Path) -> list[Path]:
    """Return where the files of a bundle may lie: in its folder or, if that is in the hub's cache, where links lead."""
    home = folder.resolve(strict=True)
    cached = home.parent.name == "snapshots" and home.parent.parent.name.startswith("models--")
    # models--ORG--NAME/snapshots/COMMIT/FILE links to blobs of its repository, and these to what repositories share.
    return [home, *(above / "blobs" for above in home.parents[1:3] if cached)]


def homes_below(bundle: Path, folder: Path) -> list[Path]:
    """Return where files of a bundle's folder may lie: there or in the hub's cache; nowhere if it leads elsewhere."""
    home, *cached = _homes(bundle)
    below = folder.resolve()
    return [below, *cached] if below.is_relative_to(home) else []


def read_inside(folder: Path, name: str, limit: int) -> bytes:
    """Return the content of a regular file inside ``folder``, of at most ``limit`` bytes."""
    file = folder / name
    try:
        if not any(map(file.resolve(strict=True).is_relative_to, _homes(folder))):
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
        remedy = "copy the bundle again"
        if isinstance(error, PermissionError):
            who = f"user {os.geteuid()}" if hasattr(os, "geteuid") else "this user"
            remedy = f"let {who} read it: chmod -R a+rX {folder}"
        raise BundleError(f"{file}: cannot be read ({reason}); {remedy}") from error


def _read_entry(folder: Path, name: str, entry: FileEntry) -> bytes:
    """Return the content of a file if it is as the manifest describes it."""
    file, blob = folder / name, read_inside(folder, name, entry.bytes)
    if len(blob) != entry.bytes:
        raise BundleError(f"{file}: expected {entry.bytes} bytes, got {len(blob)}; copy the bundle again")
    if (digest := hashlib.sha256(blob).hexdigest()) != entry.sha256:
        raise BundleError(
            f"{file}: expected SHA-256 {entry.sha256[:12]}…, got {digest[:12]}…; the file was altered "
            "or damaged, copy the bundle again"
        )
    return blob


def tensors_of(file: Path, blob: bytes) -> dict[str, Tensor]:
    try:
        header = blob[8 : 8 + int.from_bytes(blob[:8], "little")]
        json.loads(header.decode(), object_pairs_hook=_reject_duplicates)  # readers may keep either duplicate
        tensors: dict[str, Tensor] = load_tensors(blob)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{file}: expected safetensors, {str(error)[:200]}; fit the bundle again") from error
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.ndim > MAX_AXES:
            raise BundleError(
                f"{file}: tensor {shorten(repr(key))} has the type {tensor.dtype} and {tensor.ndim} axes, which "
                "no bundle holds; fit it again"
            )
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BundleError(f"{file}: tensor {shorten(repr(key))} has NaN or infinite values; fit the bundle again")
    return tensors
