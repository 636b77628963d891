"""The ranges of arguments, values that command lines take as text, and the settings of a fit.

What needs torch is imported when a fit begins, so that the command line shows the defaults at once.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, TypedDict, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic.functional_validators import ModelWrapValidatorHandler

from psc_core.errors import UsageError, hint

if TYPE_CHECKING:
    import torch

    from psc_core.compute import Compute


_WHOLE_NUMBER: Final = re.compile(r"0|[0-9]*[1-9][0-9]*")  # Python itself would read "1_0" and " 5" too
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Range:
    """The numbers that an argument may be, those between two bounds that are not among them."""

    noun: str  # as messages name it
    kind: type[int] | type[float]
    above: int | float
    below: int | float = math.inf

    def __contains__(self, value: Any) -> bool:
        return bool(self.above < value < self.below)  # NaN is in none.

    def parse(self, text: str) -> Any:
        """Return the number in ``text`` (argparse type)."""
        return self._parsed(text, self.noun)

    def parse_or_auto(self, text: str) -> Any:
        """Return the number in ``text``, or None for ``"auto"`` (argparse type)."""
        return None if text == "auto" else self._parsed(text, f"{self.noun} or auto")

    def _parsed(self, text: str, wanted: str) -> Any:
        with suppress(ValueError):
            value = self.kind(text)
            if value in self and (self.kind is float or _WHOLE_NUMBER.fullmatch(text)):
                return value
        raise ArgumentTypeError(f"expected {wanted}, got {text!r}")


POSITIVE: Final = Range("a positive integer", int, 0)
WHOLE: Final = Range("0 or a positive integer", int, -1)
SEED: Final = Range("a whole number from 0 to 2**63 - 1", int, -1, 1 << 63)
DAYS: Final = Range("a number of days from 1 to 36500", int, 0, 36_501)
POSITIVE_NUMBER: Final = Range("a number above 0", float, 0)
FRACTION: Final = Range("a number between 0 and 1", float, 0, 1)
positive, whole, positive_number = POSITIVE.parse, WHOLE.parse, POSITIVE_NUMBER.parse
open_unit_interval = FRACTION.parse


def by_commas(text: str) -> list[str]:
    """Split ``a,b`` into its parts; for flags with ``action="extend"``."""
    return [part.strip() for part in text.split(",") if part.strip()]


def key_values(pairs: Sequence[str]) -> dict[str, Any]:
    """Parse ``["a=1", "b=x"]`` into ``{"a": 1, "b": "x"}``; values that are not JSON stay text."""
    result: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"expected key=value, got {pair!r}")
        try:
            result[key] = json.loads(value)
        except ValueError:
            result[key] = value
    return result


def day(text: str) -> str:
    """Return a day given as YYYY-MM-DD (argparse type)."""
    with suppress(ValueError):
        if date.fromisoformat(text).isoformat() == text:
            return text
    raise ArgumentTypeError(f"expected a day as YYYY-MM-DD, got {text!r}")


def byte_count(text: str) -> int:
    """Parse ``"512M"``, ``"2G"`` or a plain number of bytes (argparse type)."""
    match = re.fullmatch(r"(\d+)([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) < 1:
        raise ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


Precision = Literal["fp32", "bf16"]
PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)  # the default first
BATCH_IMAGES: Final = 256  # default number of images that pass through the network at once
MAX_MEMORY: Final = 1 << 30  # default budget of one stage's statistics and the features of a batch, bytes
Backend = Literal["folded", "plain", "onnx"]  # ways to run the network of a fitted model, see psc_core.pipeline
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)  # first the one that a fit calibrates
EPSILON: Final = 0.2  # the cutoff on NC1 below which a layer has collapsed, as in the paper
TABLE_FORMATS: Final = ("jsonl", "parquet")  # of the parts that psc-score writes, the default first
COLUMN: Final = "image"  # the column of a Parquet file that psc-score reads by default
# The kinds of heads by task, the default first; named here so that a command line needs no torch to list them.
HEAD_KINDS: Final = {"classification": ("laplace", "sngp", "duq"), "regression": ("blr", "dve")}
DensityKind = Literal["gda", "tied", "gda++", "mahalanobis++", "pooled++", "rmd"]
Predictions = Literal["auto", "psc", "original"]  # the better of the two, the fitted head, or the original network
HeadInput = Literal["both", "z"]  # z with the features averaged over positions, or z alone as in the paper
OodScore = Literal["checks", "density"]  # all checks combined, or the density alone
Granularity = Literal["operations", "blocks", "all"]  # modules that count as layers, see psc_core.network.layers


class Stage(StrEnum):
    """The stage that alone reads a setting."""

    COLLAPSE = "collapse"
    PROJECTION = "projection"
    LAST = "last"  # No checkpoint holds it: an interrupted fit may resume with other values of its settings.


@dataclass(frozen=True)
class Facts:
    """What is known of a setting besides its type."""

    range: Range | None = None  # the numbers that it may be
    stage: Stage | None = None  # the only stage that reads it; None: several do
    calibrates: bool = False  # whether the calibration of a fitted model reads it too
    of_machine: bool = False  # whether it suits the machine: the command that fits an older bundle again leaves it out
    owner: str | None = None  # the models that it is for, in words; None: all


_COLLAPSE, _PROJECTION, _LAST = Facts(stage=Stage.COLLAPSE), Facts(stage=Stage.PROJECTION), Facts(stage=Stage.LAST)
_SIZE, _RATE = Facts(POSITIVE, Stage.PROJECTION), Facts(FRACTION, Stage.LAST, calibrates=True)


class FitSettings(BaseModel):
    """The settings of all stages, named as the flags and the provenance of a bundle name them.

    Raises:
        UsageError: If a name is unknown, or a value has another type than its setting, or is outside of its range.

    Examples:
        >>> FitSettings(device="cpu", batch_images=32).compute().batch_size
        32
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    task: str = "classification"
    layer: str = "auto"  # chosen layer; auto: chosen by collapse
    layers: Annotated[str | None, _COLLAPSE] = None  # regular expression of the layers to measure; None: all
    granularity: Annotated[Granularity, _COLLAPSE] = "operations"
    epsilon: Annotated[float, Facts(FRACTION)] = EPSILON
    c_proj: Annotated[int | None, _SIZE] = None  # None: chosen by the fit, and so are d_proj and pca
    d_proj: Annotated[int | None, _SIZE] = None
    minimum_dim: Annotated[int, _SIZE] = 64
    no_second_scaling: Annotated[bool, _PROJECTION] = False
    density: DensityKind = "pooled++"
    pca: Annotated[int | None, Facts(POSITIVE, Stage.LAST)] = None
    head: Annotated[str | None, _LAST] = None  # None: the first of the task's heads
    head_input: Annotated[HeadInput, Facts(owner="a classifier")] = "both"
    predictions: Annotated[Predictions, _LAST] = "auto"
    alpha: Annotated[float, _RATE] = 0.05
    coverage: Annotated[float, _RATE] = 0.95
    # Of accepted images; None: the lowest of a few that can be shown.
    risk: Annotated[float | None, Facts(FRACTION, Stage.LAST, calibrates=True, owner="a classifier")] = None
    # Of an interval, in the target's unit; None: that of an interval which looks at no image.
    max_width: Annotated[float | None, Facts(POSITIVE_NUMBER, Stage.LAST, calibrates=True, owner="a regression")] = None
    ood_score: Annotated[OodScore, _LAST] = "checks"
    stored_images: Annotated[int | None, Facts(POSITIVE, Stage.LAST)] = None  # training images kept as stored_images
    precision: Precision = "fp32"
    batch_images: Annotated[int, Facts(POSITIVE, calibrates=True, of_machine=True)] = BATCH_IMAGES
    max_images: Annotated[int | None, Facts(POSITIVE)] = None  # training images, balanced over classes; None: all
    max_memory: Annotated[int, Facts(POSITIVE, of_machine=True)] = MAX_MEMORY  # bytes
    seed: Annotated[int, Facts(SEED)] = 0
    # auto, cpu, cuda, cuda:N or torch's own, which is not imported here; no bundle records it.
    device: Annotated[Any, Facts(of_machine=True)] = "auto"

    @model_validator(mode="wrap")
    @classmethod
    def _explain(cls, values: Any, handler: ModelWrapValidatorHandler[FitSettings]) -> FitSettings:
        try:
            return handler(values)
        except ValidationError as error:
            raise UsageError(_fault(error)) from None

    @field_validator("*", mode="before")
    @classmethod
    def _check_range(cls, value: Any, info: Any) -> Any:
        """Return numpy's numbers as Python's, which a manifest can hold; refuse those outside of the range."""
        name = info.field_name or ""
        wanted = FACTS[name].range
        if wanted is None or isinstance(value, bool) or not isinstance(value, Real):
            return value
        if value not in wanted:
            or_none = " or None" if cls.model_fields[name].default is None else ""
            raise UsageError(f"expected {name} to be {wanted.noun}{or_none}, got {value}")
        return float(value) if wanted.kind is float else int(value) if isinstance(value, Integral) else value

    def changed(self, changes: Mapping[str, Any]) -> FitSettings:
        """Return the settings with others by name, as Python functions take them; :class:`UsageError` for a bad one."""
        if "task" in changes:
            raise UsageError("expected no task: PSC and fit_psc fit classifiers, PSCRegressor and fit_regressor others")
        return type(self)(**{**dict(self), **changes})

    def of_task(self, task: str, heads: Collection[str]) -> FitSettings:
        """Return the settings for one task, with the task's first head if none is named."""
        return type(self)(**{**dict(self), "task": task, "head": self.head_of(heads)})

    def head_of(self, heads: Collection[str]) -> str:
        return self.head or next(iter(heads))

    def compute(self, processes: tuple[int, int] = (0, 1)) -> Compute:
        """Return what all stages of a fit use; ``processes`` are this one's rank and the number of all."""
        from psc_core.compute import Compute, resolve_device

        device = resolve_device(self.device)
        return Compute(device, self.precision, self.batch_images, self.max_memory, *processes)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a bundle records, as JSON types."""
        return {name: value for name, value in self if name != "device"}

    def of_stages(self) -> dict[str, Any]:
        """Return the settings that the stages in a checkpoint read, as JSON types."""
        last = settings_where(stage=Stage.LAST)
        return {name: value for name, value in self.recorded().items() if name not in last}


class FitOptions(TypedDict, total=False):
    """The settings of a fit as keywords of Python functions: those of :class:`FitSettings` but its task."""

    layer: str
    layers: str | None
    granularity: Granularity
    epsilon: float
    c_proj: int | None
    d_proj: int | None
    minimum_dim: int
    no_second_scaling: bool
    density: DensityKind
    pca: int | None
    head: str | None
    head_input: HeadInput
    predictions: Predictions
    alpha: float
    coverage: float
    risk: float | None
    max_width: float | None
    ood_score: OodScore
    stored_images: int | None
    precision: Precision
    batch_images: int
    max_images: int | None
    max_memory: int
    seed: int
    device: str | torch.device


FACTS: Final[dict[str, Facts]] = {
    name: next((each for each in field.metadata if isinstance(each, Facts)), Facts())
    for name, field in FitSettings.model_fields.items()
}
DEFAULTS: Final = FitSettings()
OWNERS: Final[Mapping[str, str]] = {name: facts.owner for name, facts in FACTS.items() if facts.owner}


def settings_where(**facts: Any) -> tuple[str, ...]:
    """Return the names of the settings that were declared with these facts, such as ``calibrates=True``."""
    return tuple(name for name in FACTS if facts.items() <= vars(FACTS[name]).items())


def _fault(error: ValidationError) -> str:
    fault = error.errors()[0]
    name, value = str(fault["loc"][0]), fault["input"]
    if fault["type"] == "extra_forbidden":
        return f"expected a setting of a fit, got {name!r}; {hint(name, [*FitOptions.__annotations__])}"
    if fault["type"] == "literal_error":
        return f"expected {name} to be one of {', '.join(choices_of(name))}, got {value!r}"
    wanted = str(FitSettings.model_fields[name].annotation).removeprefix("<class '").removesuffix("'>")
    return f"expected {name} of type {wanted}, got {value!r} of type {type(value).__name__}"


def choices_of(name: str) -> tuple[str, ...]:
    """Return the words that a setting may be; none if it is no choice."""
    return tuple(each for each in get_args(FitSettings.model_fields[name].annotation) if isinstance(each, str))
