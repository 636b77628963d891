"""The description that a network gives of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from psc_core.images.preprocess import Preprocess

Aspect = Literal["whole", "size", "interpolation", "statistics"]
"""The parts of a preprocessing that flags replace: all of it; size and crop; the filter; mean and deviation."""


@dataclass(frozen=True)
class Preparation:
    """The preprocessing that a network was trained with, as far as PSC can do it.

    ``unlike`` has a sentence for each part in which ``preprocess`` is not what is written down, only near it.
    """

    preprocess: Preprocess
    unlike: Mapping[Aspect, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """A network described by its own files; every field is empty unless they say it."""

    spec: str = ""  # builds the network by name, without its weights and its folder; empty where no name does
    model_args: Mapping[str, Any] = field(default_factory=dict)  # of the builder, JSON types
    folder: Path | None = None  # where all of it lies
    configuration: Path | None = None  # the file in it that says how the network is built
    outputs: int | None = None  # number of logits
    classes: tuple[str, ...] | None = None  # in the order of the logits
    preparation: Preparation | None = None
    weights: tuple[Path, ...] = ()  # all files that hold some
