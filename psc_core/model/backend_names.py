"""The names of the backends (:mod:`psc_core.model.backends`), without an import of torch."""

from __future__ import annotations

from typing import Final, Literal, get_args

Backend = Literal["folded", "plain", "onnx"]
BACKENDS: Final[tuple[Backend, ...]] = get_args(Backend)
"""``folded`` first, which every model can run on."""
