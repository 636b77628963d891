"""Memory and utilisation of a GPU, for the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GpuUsage:
    """Memory in bytes by kind, and the fraction of time the GPU was busy; empty on a CPU."""

    memory_bytes: Mapping[str, int]
    utilisation: float | None


def gpu_usage(device: torch.device) -> GpuUsage:
    """Return the memory and use of a device for the metrics; utilisation needs the NVML bindings."""
    if device.type != "cuda":
        return GpuUsage({}, None)
    free, total = torch.cuda.mem_get_info(device)
    memory = {"used": total - free, "total": total, "allocated": torch.cuda.memory_allocated(device)}
    try:
        return GpuUsage(memory, torch.cuda.utilization(device) / 100.0)
    except Exception:  # No bindings, no library, or a part of a GPU: NVML has errors of its own.
        return GpuUsage(memory, None)
