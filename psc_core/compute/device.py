"""The device that computes, chosen by name, and the floating-point format of a network on it."""

from __future__ import annotations

import torch

from psc_core.errors import UsageError
from psc_core.precision import Precision


def resolve_device(name: str | torch.device) -> torch.device:
    """Return the device ``"auto"`` (CUDA if available, else the CPU), ``"cpu"``, ``"cuda"`` or ``"cuda:N"``.

    On CUDA this turns off TF32 for the process: cuDNN's convolutions use it by default, and a bundle fitted on one
    device would not give the same numbers on another.

    Raises:
        UsageError: If the name is unknown, or this machine does not have the CUDA device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    unknown = UsageError(f"expected a device auto, cpu, cuda or cuda:N, got {name!r}")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):
        raise unknown
    if device.type == "cuda":
        if (device.index or 0) >= torch.cuda.device_count():
            raise UsageError(
                f"no CUDA device {name!r}, this machine has {torch.cuda.device_count()}; use --device cpu or auto"
            )
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return device


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a network runs; everything after the network runs outside of it, in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
