"""Sample the utilisation of the first GPU from ``nvidia-smi`` while a server answers."""

from __future__ import annotations

import contextlib
import statistics
import subprocess

from benchmarks.runs import Json

EVERY_MS = 100
_QUERY = ("nvidia-smi", "--id=0", "--query-gpu=utilization.gpu,memory.used", "--format=csv,noheader,nounits")


class GpuUse:
    """Samples inside the ``with`` block; finds nothing without ``nvidia-smi``.

    Attributes:
        found: The mean ``gpu_utilisation`` (the fraction of time in which a kernel ran), and the maximum
            ``gpu_memory_mib``.
    """

    def __init__(self) -> None:
        self.found: Json = {}

    def __enter__(self) -> GpuUse:
        self._process: subprocess.Popen[str] | None = None
        with contextlib.suppress(FileNotFoundError):
            self._process = subprocess.Popen(
                [*_QUERY, f"--loop-ms={EVERY_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is None:
            return
        self._process.terminate()
        text, _nothing = self._process.communicate()
        samples = [sample for line in text.splitlines() if (sample := _sample(line)) is not None]
        if samples:
            busy, used = zip(*samples, strict=True)
            self.found = {"gpu_utilisation": round(statistics.mean(busy) / 100, 3), "gpu_memory_mib": max(used)}


def _sample(line: str) -> tuple[int, int] | None:
    """Return per cent and MiB; None for a truncated line and for ``[N/A]``."""
    try:
        busy, used = map(int, line.split(","))
    except ValueError:
        return None
    return busy, used
