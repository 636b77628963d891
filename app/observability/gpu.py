"""Read the memory and utilisation of a GPU, for the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuUsage:
    """The memory by use, bytes, and the fraction of time that the GPU was busy; empty and None on a CPU."""

    memory_bytes: Mapping[str, int]
    utilisation: float | None


def gpu_usage(device: torch.device) -> GpuUsage:
    """Return a device's memory and utilisation; the latter needs the NVML bindings."""
    if device.type != "cuda":
        return GpuUsage({}, None)
    free, total = torch.cuda.mem_get_info(device)
    memory = {"used": total - free, "total": total, "allocated": torch.cuda.memory_allocated(device)}
    try:
        return GpuUsage(memory, torch.cuda.utilization(device) / 100.0)
    except Exception:  # Without the bindings, without the library, or on a part of a GPU: each has errors of its own.
        return GpuUsage(memory, None)
