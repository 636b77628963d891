"""The ranges of arguments, of command lines and Python alike, and values that command lines take as text.

The settings of a fit: the flags of ``psc-fit`` with their defaults, and the part that a bundle records.

What needs torch is imported when a fit begins, so that the command line shows the defaults at once.
"""

from __future__ import annotations

import json
import math
import re
from argparse import ArgumentTypeError
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import Field, dataclass, field, fields, replace
from datetime import date
from enum import StrEnum
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from psc_core.errors import UsageError, hint

if TYPE_CHECKING:
    import torch

    from psc_core.compute import Compute


_WHOLE_NUMBER: Final = re.compile(r"0|[0-9]*[1-9][0-9]*")
"""What is read as an integer; Python itself would read "1_0" and " 5" too."""

_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@dataclass(frozen=True)
class Range:
    """The numbers that an argument may be, those between two bounds that are not among them.

    Example:
        >>> 0.5 in FRACTION, 1.0 in FRACTION, POSITIVE.parse("3")
        (True, False, 3)
    """

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
    try:
        if date.fromisoformat(text).isoformat() == text:
            return text
    except ValueError:
        pass
    raise ArgumentTypeError(f"expected a day as YYYY-MM-DD, got {text!r}")


def byte_count(text: str) -> int:
    """Parse ``"512M"``, ``"2G"`` or a plain number of bytes (argparse type)."""
    match = re.fullmatch(r"(\d+)([kmg]?)i?b?", text.strip().lower())
    if not match or int(match[1]) < 1:
        raise ArgumentTypeError(f"expected a size such as 512M or 2G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


Precision = Literal["fp32", "bf16"]

PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
"""All formats, the default first."""


BATCH_IMAGES: Final = 256
"""Default number of images that pass through the network at once."""

MAX_MEMORY: Final = 1 << 30
"""Default budget of one stage's statistics and the features of a batch, bytes."""


Backend = Literal["folded", "plain", "onnx"]
"""The ways to run the network of a fitted model; see :mod:`psc_core.pipeline`."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
"""All backends; the first is the one that a fit calibrates."""


EPSILON: Final = 0.2
"""The cutoff ε on NC1 below which a layer has collapsed, as in the paper."""

HEAD_KINDS: Final = {"classification": ("laplace", "sngp", "duq"), "regression": ("blr", "dve")}
"""The kinds of heads by task, the default first; named here so that a command line needs no torch to list them."""

DENSITY_KINDS: Final = ("gda", "tied", "gda++", "mahalanobis++", "pooled++", "rmd")
"""The kinds of densities."""

PREDICTIONS: Final = ("auto", "psc", "base")
"""The sources of a model's predictions: the better of the two, the fitted head, or the network itself."""

HEAD_INPUTS: Final = ("both", "z")
"""The inputs of a classifier's head: z with the features averaged over positions, or z alone as in the paper."""

OOD_SCORES: Final = ("gates", "density")
"""The scores from which the p-value is computed: all gates combined, or the density alone."""


class Stage(StrEnum):
    """The stage that alone reads a setting."""

    COLLAPSE = "collapse"
    PROJECTION = "projection"
    LAST = "last"  # No checkpoint holds it: an interrupted fit may resume with other values of its settings.


def _facts(
    values: Range | None = None,
    *,
    stage: Stage | None = None,
    calibrates: bool = False,
    of_machine: bool = False,
    owner: str | None = None,
) -> dict[str, Any]:
    """Return the metadata of a setting.

    Args:
        values: The numbers that it may be.
        stage: The only stage that reads it; None: several do.
        calibrates: Whether the calibration of a fitted model reads it too.
        of_machine: Whether it suits the machine; the command that fits an older bundle again leaves it out.
        owner: The models that it is for, in words; None: all.
    """
    return {"values": values, "stage": stage, "calibrates": calibrates, "of_machine": of_machine, "owner": owner}


@dataclass(frozen=True)
class FitSettings:
    """The settings of all stages, named as the flags and the provenance of a bundle name them.

    Raises:
        UsageError: If a value has another type than its setting, or is outside of its range.

    Example:
        >>> FitSettings(device="cpu", batch_images=32).compute().batch_size
        32
    """

    task: str = "classification"
    layer: str = "auto"  # candidate layer; auto: chosen by collapse
    # Regular expression of the layers to measure; None: all.
    layers: str | None = field(default=None, metadata=_facts(stage=Stage.COLLAPSE))
    granularity: str = field(default="operations", metadata=_facts(stage=Stage.COLLAPSE))
    epsilon: float = field(default=EPSILON, metadata=_facts(FRACTION))
    # None: chosen by the fit, and so are d_proj and pca.
    c_proj: int | None = field(default=None, metadata=_facts(POSITIVE, stage=Stage.PROJECTION))
    d_proj: int | None = field(default=None, metadata=_facts(POSITIVE, stage=Stage.PROJECTION))
    minimum_dim: int = field(default=64, metadata=_facts(POSITIVE, stage=Stage.PROJECTION))
    no_second_scaling: bool = field(default=False, metadata=_facts(stage=Stage.PROJECTION))
    density: str = "pooled++"
    pca: int | None = field(default=None, metadata=_facts(POSITIVE, stage=Stage.LAST))
    head: str | None = field(default=None, metadata=_facts(stage=Stage.LAST))  # None: the first of the task's heads
    head_input: str = field(default="both", metadata=_facts(owner="a classifier"))
    predictions: str = field(default="auto", metadata=_facts(stage=Stage.LAST))
    alpha: float = field(default=0.05, metadata=_facts(FRACTION, stage=Stage.LAST, calibrates=True))
    coverage: float = field(default=0.95, metadata=_facts(FRACTION, stage=Stage.LAST, calibrates=True))
    # Of accepted images; None: the lowest of a few that can be shown.
    risk: float | None = field(
        default=None, metadata=_facts(FRACTION, stage=Stage.LAST, calibrates=True, owner="a classifier")
    )
    # Of an interval, in the target's unit; None: no limit.
    max_width: float | None = field(
        default=None, metadata=_facts(POSITIVE_NUMBER, stage=Stage.LAST, calibrates=True, owner="a regression")
    )
    ood_score: str = field(default="gates", metadata=_facts(stage=Stage.LAST))
    # Training images kept as thumbnails; None: none.
    keep_examples: int | None = field(default=None, metadata=_facts(POSITIVE, stage=Stage.LAST))
    precision: str = "fp32"
    batch_images: int = field(default=BATCH_IMAGES, metadata=_facts(POSITIVE, calibrates=True, of_machine=True))
    # Training images, balanced over classes; None: all.
    max_images: int | None = field(default=None, metadata=_facts(POSITIVE))
    max_memory: int = field(default=MAX_MEMORY, metadata=_facts(POSITIVE, of_machine=True))  # bytes
    seed: int = field(default=0, metadata=_facts(SEED))
    # auto, cpu, cuda or cuda:N; no bundle records it.
    device: str | torch.device = field(default="auto", metadata=_facts(of_machine=True))

    def __post_init__(self) -> None:
        for each in fields(self):
            _check(each, getattr(self, each.name))

    def changed(self, changes: Mapping[str, Any]) -> FitSettings:
        """Return the settings with others by name, as Python functions take them.

        Raises:
            UsageError: If a name is none of the settings', a value has another type or is outside of its range, or
                ``task`` is among them, which the class or function decides.
        """
        return replace(self, **{name: _as_python(_field(name), value) for name, value in changes.items()})

    def of_task(self, task: str, heads: Collection[str]) -> FitSettings:
        """Return the settings for one task, with the task's first head if none is named."""
        return replace(self, task=task, head=self.head_of(heads))

    def head_of(self, heads: Collection[str]) -> str:
        """Return the kind of the head, by default the task's first."""
        return self.head or next(iter(heads))

    def compute(self, processes: tuple[int, int] = (0, 1)) -> Compute:
        """Return the device, precision, batch size, processes and memory that all stages of a fit use.

        Args:
            processes: The rank of this process, and the number of those that fit together.

        Raises:
            UsageError: If the precision is unknown, or the device does not exist.
        """
        from psc_core.compute import Compute, resolve_device

        if self.precision not in PRECISIONS:
            raise UsageError(f"expected a precision of {', '.join(PRECISIONS)}, got {self.precision!r}")
        device = resolve_device(self.device)
        return Compute(device, self.precision, self.batch_images, self.max_memory, *processes)

    def recorded(self) -> dict[str, Any]:
        """Return the settings that a bundle records, as JSON types."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "device"}

    def of_stages(self) -> dict[str, Any]:
        """Return the settings that the stages in a checkpoint read, as JSON types."""
        last = settings_where(stage=Stage.LAST)
        return {name: value for name, value in self.recorded().items() if name not in last}


def settings_where(**facts: Any) -> tuple[str, ...]:
    """Return the names of the settings that were declared with these facts, such as ``calibrates=True``."""
    return tuple(each.name for each in fields(FitSettings) if facts.items() <= each.metadata.items())


RANGES: Final[Mapping[str, Range]] = {
    each.name: each.metadata["values"] for each in fields(FitSettings) if each.metadata.get("values")
}
"""The numbers that a setting may be, by its name; the flags of ``psc-fit`` have the same."""

OWNERS: Final[Mapping[str, str]] = {
    each.name: each.metadata["owner"] for each in fields(FitSettings) if each.metadata.get("owner")
}
"""The models that alone read a setting, in words, by its name."""

_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,), "int": (Integral,), "float": (Real,), "bool": (bool,), "None": (type(None),)
}  # fmt: skip
"""The types that a value may have, by the word in a field's annotation."""


def _field(name: str) -> Field[Any]:
    """Return the field of a setting by name; raise :class:`UsageError` if no function takes this name."""
    if name == "task":
        raise UsageError("expected no task: PSC and fit_psc fit classifiers, PSCRegressor and fit_regressor others")
    known = {each.name: each for each in fields(FitSettings) if each.name != "task"}
    if name not in known:
        raise UsageError(f"expected a setting of a fit, got {name!r}; {hint(name, list(known))}")
    return known[name]


def _types_of(each: Field[Any]) -> tuple[type, ...]:
    return sum((_TYPES[word] for word in str(each.type).split(" | ")), ())


def _check(each: Field[Any], value: Any) -> None:
    """Raise :class:`UsageError` if a value has another type than the setting, or is outside of its range."""
    if each.name == "device":
        return  # Its type is torch's, which is not imported here; compute() refuses what is no device.
    types = _types_of(each)
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise UsageError(f"expected {each.name} of type {each.type}, got {value!r} of type {type(value).__name__}")
    wanted = each.metadata.get("values")
    if wanted is not None and value is not None and value not in wanted:
        or_none = " or None" if type(None) in types else ""
        raise UsageError(f"expected {each.name} to be {wanted.noun}{or_none}, got {value}")


def _as_python(each: Field[Any], value: Any) -> Any:
    """Return numpy's numbers as Python's, which a manifest can hold, and anything else as it is, once checked."""
    _check(each, value)
    if each.name == "device" or isinstance(value, bool):
        return value
    types = _types_of(each)
    if Real in types and isinstance(value, Real):
        return float(value)
    return int(value) if Integral in types and isinstance(value, Integral) else value
