"""The description of a network by its files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from psc_core.images.preparation import Preparation


@dataclass(frozen=True)
class Described:
    """A network described by its own files; a field is empty if they do not say it."""

    spec: str = ""  # builds the network by name, without its weights and its folder; empty if no name does
    model_args: Mapping[str, Any] = field(default_factory=dict)  # arguments of the builder, JSON types
    folder: Path | None = None  # the folder of all its files
    configuration: Path | None = None  # the file in the folder that says how the network is built
    outputs: int | None = None  # number of logits
    classes: tuple[str, ...] | None = None  # class names in the order of the logits
    preparation: Preparation | None = None
    weights: tuple[Path, ...] = ()  # all files with weights
