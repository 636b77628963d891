"""Read the settings of an adapter from environment variables ``BENCH_…``; imports nothing heavy."""

from __future__ import annotations

import os
import struct

FACTORY = "benchmarks.serving.inputs:network"
MAX_BATCH = 64
JPEG = b"\xff\xd8\xff"  # The first bytes of a JPEG file.
COUNTS = struct.Struct("<qq")  # The steps and images so far, in a file of each process that runs the model.


def port() -> int:
    return option("PORT", 8000)


def option(name: str, default: int) -> int:
    return int(os.environ.get(f"BENCH_{name}", default))
