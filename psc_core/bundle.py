"""The bundle: a directory of ``manifest.json`` and safetensors files; ``docs/bundle-format.md`` specifies it.

Reading verifies, in this order and before anything is used: the manifest's size, schema and agreement with
itself, every file's place, length and SHA-256, every tensor's type and finiteness, the manifest's own digest.
Nothing is unpickled, no code runs, and no size that a bundle claims is allocated before it is seen to be real.
Writing goes to a temporary directory that replaces the target in one rename, so a bundle is whole or absent.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from psc_core.errors import BundleError

SCHEMA: Final = 1
"""Version of the bundle format; a reader refuses any other."""

PARTS = ("backbone", "projection", "density", "head", "calibration")
"""Tensor files a bundle may have; ``head`` is absent for base predictions."""

MAX_MANIFEST_BYTES: Final = 16 << 20
"""Largest manifest; one of 100,000 classes and 1,000 layers has about 4 MiB."""

MAX_DEPTH: Final = 32
"""Deepest nesting of lists and objects in a manifest."""

MAX_PART_BYTES: Final = 16 << 30
"""Largest tensor file."""

MAX_INPUT_PIXELS: Final = 1 << 22
"""Largest network input, height × width."""

MAX_ARGUMENT: Final = 1 << 16
"""Largest magnitude of a number among a network's model arguments: sizes and counts."""

MAX_AXES: Final = 8
"""Most axes of a tensor."""

_DTYPES: Final = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)  # fmt: skip

_Size = Annotated[int, Field(ge=1, le=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class FileEntry(_Strict):
    """Length and digest of one file."""

    bytes: int = Field(ge=0, le=MAX_PART_BYTES)
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


class _Preprocess(_Strict):
    mode: Literal["L", "RGB"]
    height: _Size
    width: _Size
    resize: Annotated[int, Field(ge=1, le=8192)] | None
    mean: list[float]
    std: list[Annotated[float, Field(gt=0)]]

    @model_validator(mode="after")
    def _fits(self) -> _Preprocess:
        if self.height * self.width > MAX_INPUT_PIXELS:
            raise ValueError(f"expected at most {MAX_INPUT_PIXELS} input pixels, got {self.height}×{self.width}")
        return self


class _Network(_Strict):
    spec: str
    num_classes: _Size
    model_args: dict[str, Any]

    @model_validator(mode="after")
    def _modest(self) -> _Network:
        if any(isinstance(value, int | float) and abs(value) > MAX_ARGUMENT for value in _leaves(self.model_args)):
            raise ValueError(f"expected model_args of numbers up to {MAX_ARGUMENT}, got {_short(self.model_args)}")
        return self


class _Hooks(_Strict):
    stop: str | None
    dropped: list[str]


class _Backbone(_Strict):
    network: _Network
    layers: list[str]
    keep_output: bool
    hooks: _Hooks | None


class _Projection(_Strict):
    method: Literal["tucker"]
    positions: list[_Size]
    channels: _Size
    c_proj: _Size
    d_proj: _Size


class _Fitted(_Strict):
    kind: str
    sizes: dict[str, _Size]
    record: dict[str, float | int]


class _Calibration(_Strict):
    images: _Size


def _section(model: type[BaseModel]) -> Any:
    """An object that ``model`` accepts, kept as it was written."""

    def check(value: dict[str, Any]) -> dict[str, Any]:
        try:
            model.model_validate(value)
        except ValidationError as error:
            raise ValueError(_first_fault(error)) from error
        return value

    return AfterValidator(check)


class Manifest(_Strict):
    """``manifest.json``; every field is described in ``docs/bundle-format.md``."""

    model_config = ConfigDict(strict=False)  # JSON's lists are tuples here

    schema_version: Literal[1] = SCHEMA
    name: str = Field(min_length=1, max_length=200)
    version: str = Field(pattern="^[0-9a-f]{12}$")
    classes: tuple[str, ...] = Field(min_length=2)
    preprocess: Annotated[dict[str, Any], _section(_Preprocess)]
    precision: Literal["fp32", "bf16"]
    predictions: Literal["psc", "base"]
    layers: tuple[str, ...] = Field(min_length=1)
    policy: Policy
    backbone: Annotated[dict[str, Any], _section(_Backbone)]
    projection: Annotated[dict[str, Any], _section(_Projection)]
    density: Annotated[dict[str, Any], _section(_Fitted)]
    head: Annotated[dict[str, Any], _section(_Fitted)] | None
    calibration: Annotated[dict[str, Any], _section(_Calibration)]
    collapse: dict[str, Any] | None
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]

    @model_validator(mode="after")
    def _check_agreement(self) -> Manifest:
        """What two fields say of the same thing must be the same."""
        head, classes = self.head, len(self.classes)
        dim = self.projection["c_proj"] * self.projection["d_proj"]
        needed = {f"{part}.safetensors" for part in PARTS if part != "head" or head is not None}
        agreements: tuple[tuple[str, Any, Any], ...] = (
            ("files", sorted(needed), sorted(self.files)),
            ("predictions", "base" if head is None else "psc", self.predictions),
            ("backbone.keep_output", head is None, self.backbone["keep_output"]),
            ("backbone.layers", list(self.layers), self.backbone["layers"]),
            ("backbone.network.num_classes", classes, self.backbone["network"]["num_classes"]),
            ("projection.positions (their number)", len(self.layers), len(self.projection["positions"])),
            ("density.sizes.classes", classes, self.density["sizes"].get("classes")),
            ("density.sizes.dim", dim, self.density["sizes"].get("dim")),
            ("head.sizes.classes", classes, classes if head is None else head["sizes"].get("classes")),
            ("head.sizes.dim", dim, dim if head is None else head["sizes"].get("dim")),
        )
        for where, expected, got in agreements:
            if expected != got:
                raise ValueError(f"expected {where} to be {_short(expected)}, got {_short(got)}")
        if len(set(self.classes)) != classes:
            raise ValueError("expected class names that differ from each other")
        return self


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
    body = json.loads(json.dumps({**fields, "schema_version": SCHEMA, "files": files}, allow_nan=False))
    manifest = Manifest.model_validate({**body, "version": manifest_digest(body)})
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


def manifest_digest(body: Mapping[str, Any]) -> str:
    """``version`` of a manifest: 12 hexadecimal digits over every other field."""
    others = {key: value for key, value in body.items() if key != "version"}
    return hashlib.sha256(json.dumps(others, sort_keys=True).encode()).hexdigest()[:12]


def _serialise(tensors: Mapping[str, Tensor]) -> bytes:
    return save_tensors({name: tensor.detach().cpu().contiguous() for name, tensor in sorted(tensors.items())})


def read_manifest(path: Path) -> Manifest:
    """Read and check ``manifest.json`` alone.

    Raises:
        BundleError: Missing, too large, not JSON, another schema, or a field out of place.
    """
    return _parse_manifest(path)[0]


def _parse_manifest(path: Path) -> tuple[Manifest, str]:
    """The manifest, and the version that its content has."""
    file = path / "manifest.json"
    if not file.exists():
        raise BundleError(f"expected a bundle at {path}, it has no manifest.json; make one with psc-fit")
    text = _read_file(path, file.name, MAX_MANIFEST_BYTES)
    try:
        body = json.loads(text, parse_constant=_no_constant)
        too_deep = _deeper_than(body, MAX_DEPTH)
    except RecursionError:
        too_deep = True
    except ValueError as error:
        raise BundleError(f"{file}: expected JSON, {error}; fit the bundle again or restore it") from error
    if too_deep:
        raise BundleError(f"{file}: expected at most {MAX_DEPTH} levels of nesting; fit the bundle again")
    if isinstance(body, dict) and body.get("schema_version") != SCHEMA:
        raise BundleError(f"{file}: expected schema_version {SCHEMA}, got {_short(body.get('schema_version'))}; use "
                          "the release that wrote it or fit again")
    try:
        return Manifest.model_validate(body), manifest_digest(body)
    except ValidationError as error:
        raise BundleError(f"{file}: {_first_fault(error)}; fit the bundle again") from error


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _inside(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _deeper_than(value: Any, levels: int) -> bool:
    return any(levels == 0 or _deeper_than(item, levels - 1) for item in _inside(value))


def _leaves(value: Any) -> Iterable[Any]:
    if not isinstance(value, dict | list):
        yield value
    for item in _inside(value):
        yield from _leaves(item)


def _first_fault(error: ValidationError) -> str:
    first = error.errors(include_input=False)[0]
    where = ".".join(str(step) for step in first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    return f"field {where!r}: {message}" if where else message


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def read_bundle(path: Path) -> Bundle:
    """Read and verify a whole bundle.

    Raises:
        BundleError: Anything that is missing, extra, altered, damaged or not finite, by name.
    """
    manifest, version = _parse_manifest(path)
    parts = {name.removesuffix(".safetensors"): _read_part(path, name, entry)
             for name, entry in manifest.files.items()}
    if manifest.version != version:
        raise BundleError(f"{path}: expected version {version}, the digest of manifest.json, it says "
                          f"{manifest.version}; the manifest was edited, copy the bundle again")
    return Bundle(manifest, parts)


def _read_file(folder: Path, name: str, most: int) -> bytes:
    """The content of a regular file of at most ``most`` bytes that lies inside ``folder``."""
    file = folder / name
    try:
        if not file.resolve(strict=True).is_relative_to(folder.resolve(strict=True)):
            raise BundleError(f"{file}: expected a file of the bundle, it is a link to elsewhere; put a copy there")
        if not file.is_file():  # neither a device nor a pipe, which have no end
            raise BundleError(f"{file}: expected a regular file; copy the bundle again")
        size = file.stat().st_size
        if size > most:
            raise BundleError(f"{file}: expected at most {most} bytes, got {size}; copy the bundle again")
        with file.open("rb") as stream:
            return stream.read(size)
    except (OSError, RuntimeError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or type(error).__name__
        raise BundleError(f"{file}: cannot be read ({reason}); copy the bundle again") from error


def check_shapes(part: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Check the names and shapes of one part against what the manifest promises, before any of it is used.

    Raises:
        BundleError: A tensor is missing, unexpected or of another shape.
    """
    if set(tensors) != set(shapes):
        raise BundleError(f"expected {part} tensors {sorted(shapes)}, got {_short(sorted(tensors))}; fit it again")
    for name, shape in shapes.items():
        if tuple(tensors[name].shape) != shape:
            raise BundleError(f"expected {part}.{name} of shape {shape}, got {tuple(tensors[name].shape)}; the bundle "
                              "is inconsistent, fit it again")


def _read_part(folder: Path, name: str, entry: FileEntry) -> dict[str, Tensor]:
    file = folder / name
    blob = _read_file(folder, name, entry.bytes)
    if len(blob) != entry.bytes:
        raise BundleError(f"{file}: expected {entry.bytes} bytes, got {len(blob)}; copy the bundle again")
    digest = hashlib.sha256(blob).hexdigest()
    if digest != entry.sha256:
        raise BundleError(f"{file}: expected SHA-256 {entry.sha256[:12]}…, got {digest[:12]}…; the file was altered "
                          "or damaged, copy the bundle again")
    try:
        tensors: dict[str, Tensor] = load_tensors(blob)
    except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BundleError(f"{file}: expected safetensors, {error}") from error
    for key, tensor in tensors.items():
        if tensor.dtype not in _DTYPES or tensor.ndim > MAX_AXES:
            raise BundleError(f"{file}: tensor {_short(key)} has the type {tensor.dtype} and {tensor.ndim} axes, which "
                              "no bundle holds; fit it again")
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise BundleError(f"{file}: tensor {_short(key)} has NaN or infinite values; fit the bundle again")
    return tensors
