"""Run processes in which PyTorch uses an older instruction set than the CPU's best, by environment variables.

oneDNN, ATen and MKL read the variables once, so they affect processes that are started inside :func:`held_to`.  ONNX
Runtime and image codecs ignore them and ask the CPU.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

AVX2: Mapping[str, str] = {
    "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"
}  # fmt: skip
AVX512: Mapping[str, str] = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16", "ATEN_CPU_CAPABILITY": "avx512"}
SETS: Mapping[str, tuple[str, Mapping[str, str]]] = {  # The CPU flag that each needs, and its environment variables.
    "AVX2": ("avx2", AVX2),
    "AVX-512": ("avx512f", AVX512),
    "AMX": ("amx_tile", {}),
}

NATIVE = "native"  # The name for a CPU that has none of :data:`SETS`.

_VECTOR = ("sse4", "avx", "amx", "fma", "f16c", "asimd", "sve")


def cpu_flags() -> list[str]:
    """Return the vector extensions that Linux reports; none on other systems."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features"))), [])
    return sorted(flag for flag in flags if flag.startswith(_VECTOR))


def available(flags: list[str] | None = None) -> list[str]:
    """Return the instruction sets of this CPU, the best last."""
    found = cpu_flags() if flags is None else flags
    return [name for name, (flag, _) in SETS.items() if flag in found] or [NATIVE]


@contextmanager
def held_to(name: str) -> Iterator[None]:
    """Limit processes that are started inside the block to this instruction set."""
    before = {key: os.environ.pop(key, None) for key in AVX2}
    if name in SETS:
        os.environ.update(SETS[name][1])
    try:
        yield
    finally:
        for key, value in before.items():
            os.environ.pop(key, None)
            if value is not None:
                os.environ[key] = value


def fresh_process() -> ProcessPoolExecutor:
    """Return a new process for calls that run one after another."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def in_fresh_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a new process, which ends after it."""
    with fresh_process() as pool:
        return pool.submit(function, *arguments).result()
