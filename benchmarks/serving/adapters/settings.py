"""Settings of an adapter from environment variables ``BENCH_…``; imports nothing heavy."""

from __future__ import annotations

import os
import struct

FACTORY = "benchmarks.serving.bundles:network"
MAX_BATCH = 64
JPEG = b"\xff\xd8\xff"
"""First bytes of a JPEG file."""
COUNTS = struct.Struct("<qq")
"""Steps and images so far: a file of each process that runs the model."""


def port() -> int:
    """To listen on."""
    return option("PORT", 8000)


def option(name: str, default: int) -> int:
    """A number, or ``default``."""
    return int(os.environ.get(f"BENCH_{name}", default))
