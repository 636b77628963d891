"""The schema of ``manifest.json``: the values that each field may hold, and the fields that must agree.

``docs/bundle-format.md`` specifies it; :mod:`psc_core.bundle.io` reads and writes the files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator, model_validator

from psc_core.errors import BundleError, UsageError, fault, shortened
from psc_core.images.preprocess import Preprocess
from psc_core.names import composed
from psc_core.precision import Precision
from psc_core.tasks import TASKS
from psc_core.tasks.policy import BasePolicy
from psc_core.tasks.task import Agreement, Task, task_type, task_type_of

SCHEMA: Final = 5
"""The version of the bundle format, the only one that is written and read."""

OPTIONAL: Final = ("gates", "map", "thumbnails")
"""The parts that a model may lack; then the manifest has no section and the bundle no file of this name."""

PARTS: Final = ("backbone", "projection", "density", "head", "calibration", *OPTIONAL)
"""The tensor files of a bundle, without their suffix."""

MAX_PART_BYTES: Final = 16 << 30
"""Maximum size of a tensor file, in bytes."""

GRAPH: Final = "backbone.onnx"
"""The file for a network that no name can build, instead of its tensors."""

HISTORY: Final = "recalibrations"
"""The entry in a bundle's provenance that lists its recalibrations, from Python or a log, the oldest first."""

MAX_NAME: Final = 200
"""Maximum length of a model name, in characters."""

MAX_ARGUMENT: Final = 1 << 16
"""Maximum magnitude of a number among a network's arguments, which are sizes and counts."""

_Size = Annotated[int, Field(ge=1, le=1 << 31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)


class FileEntry(_Strict):
    """The length and the digest of one file."""

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
                f"expected model_args of numbers up to {MAX_ARGUMENT}, got {shortened(repr(self.model_args))}"
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


class _Head(_FittedSection):
    layers: list[str] = []


class _Calibration(_Strict):
    images: _Size


class _Texture(_Strict):
    layer: str
    density: _FittedSection
    counts_below: float = Field(gt=0, le=1)


class _Gates(_Strict):
    names: list[str] = Field(min_length=1)
    images: _Size
    texture: _Texture | None


class _Grid(_Strict):
    rows: _Size
    columns: _Size
    first: int = Field(ge=0)


class MapSection(_Strict):
    """The section ``map``: the layer that a map reads."""

    layer: str
    grid: _Grid
    density: _FittedSection


class ThumbnailsSection(_Strict):
    """The section ``thumbnails``: the sizes of the kept training images."""

    count: _Size
    kept: _Size
    channels: _Size
    height: _Size
    width: _Size


def check_network(network: Mapping[str, Any]) -> None:
    """Check, before anything is fitted, that a manifest can describe a network, given the fields of its ``Recipe``.

    Raises:
        UsageError: If a size or an argument exceeds its limit.
    """
    try:
        check_text(network)
        _Network.model_validate_json(json.dumps(network))
    except ValidationError as error:
        raise UsageError(fault(error.errors()[0], "field")) from error
    except (TypeError, ValueError) as error:
        raise UsageError(f"expected numbers and text that JSON can hold: {error}") from error


class Manifest(_Strict):
    """The content of ``manifest.json``; ``docs/bundle-format.md`` describes every field.

    :func:`manifest_of` creates one, of a subclass with the fields of its task.
    """

    task_type: ClassVar[type[Task]]

    schema_version: Literal[5]
    name: str = Field(min_length=1, max_length=MAX_NAME)
    version: str = Field(pattern="^[0-9a-f]{12}$")
    classes: tuple[str, ...] = Field(min_length=2)
    preprocess: Preprocess
    precision: Precision
    predictions: Literal["psc", "base"]
    layers: tuple[str, ...] = Field(min_length=1)
    policy: BasePolicy
    backbone: _Backbone
    projection: _Projection
    density: _FittedSection
    head: _Head
    calibration: _Calibration
    gates: _Gates | None = None
    map: MapSection | None = None
    thumbnails: ThumbnailsSection | None = None
    collapse: dict[str, Any] | None
    metrics: dict[str, Any]
    provenance: dict[str, Any]
    files: dict[str, FileEntry]

    @field_validator("classes")
    @classmethod
    def _compose(cls, classes: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(composed, classes))

    @model_validator(mode="after")
    def _check_agreement(self) -> Manifest:
        """Check that fields agree where one follows from another."""
        head, classes = self.head, len(self.classes)
        dim = self.projection.c_proj * self.projection.d_proj
        texture = None if self.gates is None else self.gates.texture
        last_layer = texture.layer if texture else None
        map_layer = None if self.map is None else self.map.layer
        of_texture = texture.density.sizes if texture else {"classes": classes}
        without = {part for part in OPTIONAL if getattr(self, part) is None}
        needed = {f"{part}.safetensors" for part in PARTS if part not in without}
        network = self.backbone.network
        if network is None:
            needed = {GRAPH, *needed} - {f"{PARTS[0]}.safetensors"}
        outputs = self.task.network_outputs(self.classes)
        agreements: tuple[Agreement, ...] = (
            ("files", sorted(needed), sorted(self.files)),
            *self.task.agreements(self),
            ("backbone.keep_output", self.predictions == "base", self.backbone.keep_output),
            ("backbone.layers", layers_of(self.layers, head.layers, last_layer, map_layer), self.backbone.layers),
            ("backbone.network.num_classes", outputs, outputs if network is None else network.num_classes),
            ("backbone.hooks", None, None if network is not None else self.backbone.hooks),
            ("projection.positions (their number)", len(self.layers), len(self.projection.positions)),
            ("density.sizes.classes", classes, self.density.sizes.get("classes")),
            ("gates.texture.density.sizes.classes", classes, of_texture.get("classes", 0)),
            ("gates.names (texture)", texture is not None, "texture" in (self.gates.names if self.gates else ())),
            ("head.sizes.dim", dim, dim if head.layers or "dim" not in head.sizes else head.sizes["dim"]),
        )
        for where, expected, got in agreements:
            if expected != got:
                raise ValueError(f"expected {where} to be {shortened(repr(expected))}, got {shortened(repr(got))}")
        if len(set(self.classes)) != classes:
            raise ValueError("expected class names that differ from each other")
        return self

    @property
    def task(self) -> Task:
        """The task of the model, with its fields of the manifest."""
        return self.task_type.model_validate({name: getattr(self, name) for name in self.task_type.model_fields})


def manifest_of(body: Any) -> Manifest:
    """Check a manifest, given as JSON types, with the fields of the task that it is for.

    Raises:
        ValidationError: If a field is wrong, or two fields do not agree.
        UsageError: If the preprocessing is impossible.
        BundleError: If the task is unknown, or the manifest should name it by another field.
    """
    if not isinstance(body, dict):
        return Manifest.model_validate(body)
    found = task_type_of(body)
    if found is None:
        name = body.get("task")
        if name not in TASKS:
            raise BundleError(
                f"expected field task to be one of {', '.join(TASKS)}, got {shortened(repr(name))}; use a newer "
                "version of psc"
            )
        named = task_type(name)
        raise BundleError(f"leave out the field task; a {named.noun} has the field {' and '.join(named.model_fields)}")
    return _manifest_type(found).model_validate_json(json.dumps(body | _meant(body.get("preprocess"))))


def _meant(preprocess: object) -> dict[str, Any]:
    """Return the section ``preprocess`` with the resizer that it implies if it names none, which is Pillow."""
    return {"preprocess": {"resizer": "pillow", **preprocess}} if isinstance(preprocess, dict) else {}


@cache
def _manifest_type(task: type[Task]) -> type[Manifest]:
    of_task: dict[str, Any] = {name: (field.annotation, field) for name, field in task.model_fields.items()}
    if not task.is_of(of_task):  # recognised by the field "task" alone
        of_task["task_name"] = (Literal[task.name], Field(alias="task"))

    class OfTask(Manifest):
        task_type = task

    return create_model("Manifest", __base__=OfTask, policy=(task.policy_type, ...), **of_task)


def layers_of(
    candidates: Sequence[str], head_layers: Sequence[str], texture: str | None, map_layer: str | None = None
) -> list[str]:
    """Return ``backbone.layers``: the candidates, the other layers of head and map, and last the texture's layer."""
    last = [] if texture is None else [texture]
    others = [*head_layers, *([] if map_layer is None else [map_layer])]
    return list(dict.fromkeys([*candidates, *(name for name in others if name not in last), *last]))


def check_text(body: object) -> None:
    """Reject lone surrogates, as in an undecodable file name: JSON can escape them, but UTF-8 cannot encode them.

    Raises:
        ValueError: If there are any, with their place in the message; or if a number is NaN or infinite.
    """
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
