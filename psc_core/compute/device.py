"""The device that computes, chosen by name, the floating-point format of a network on it, and PyTorch's own state.

A program may set a default type or device, or call from within autocast or inference mode, and a package may do so when
it is imported.  Every public function that computes runs in :func:`own_state`, so that its numbers are the calibrated
ones.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

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


@contextmanager
def own_state() -> Iterator[None]:
    """Run a block or, as a decorator, a function in float32, on the CPU unless a device is named, without autocast and
    outside of inference mode; then restore the caller's state.
    """
    with ExitStack() as entered:
        entered.enter_context(_DEFAULT_TYPE)
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                entered.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device().type != "cpu":
            entered.enter_context(torch.device("cpu"))
        entered.enter_context(torch.inference_mode(False))
        entered.enter_context(torch.enable_grad())
        yield


class _DefaultType:
    """Makes float32 the default type, which all threads of a process share, as long as one of them is inside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._outside = torch.float32

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._outside = torch.get_default_dtype()
            self._inside += 1
            self._set(torch.float32)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            self._set(torch.float32 if self._inside else self._outside)  # An import inside may have set another.

    def _set(self, dtype: torch.dtype) -> None:
        if torch.get_default_dtype() != dtype:
            torch.set_default_dtype(dtype)


_DEFAULT_TYPE = _DefaultType()
