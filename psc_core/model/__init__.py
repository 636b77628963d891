"""The fitted model: pixels to outputs, outputs to decisions, save and load."""

from __future__ import annotations

from typing import Final, Literal, get_args

Backend = Literal["folded", "plain", "onnx"]
"""The ways to run the network of a fitted model; see :mod:`psc_core.model.backends`."""

BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
"""All backends; the first is the one that a fit calibrates."""
