"""The float format of a network: ``"fp32"``, or ``"bf16"`` under autocast.  Everything after the network is float32."""

from __future__ import annotations

from typing import Final, Literal, get_args

Precision = Literal["fp32", "bf16"]

PRECISIONS: Final[tuple[Precision, ...]] = get_args(Precision)
"""Every format, the default first."""
