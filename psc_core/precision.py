"""The floating-point format of a network: ``"fp32"``, or ``"bf16"`` under autocast.  All later steps use float32."""

from __future__ import annotations

from typing import Final, Literal, get_args

Precision = Literal["fp32", "bf16"]

PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
"""All formats, the default first."""
