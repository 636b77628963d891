"""Whether a model can be warmed up here at all, asked before hours or the machine's memory are spent on it.

One image tells: its time and its largest feature map, times the images of a full batch.  Warming up runs batches of
1, 2, 4, … images, together twice a full one; three feature maps of a batch are alive at once.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from psc_core.errors import BundleError
from psc_core.model.predictor import PSC

ALIVE: Final = 3
"""Feature maps of a batch in memory at once: input and output of an operation, and a shortcut around it."""

_MEMORY_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")
_MEMORY_USED: Final = Path("/sys/fs/cgroup/memory.current")


def check_affordable(model: PSC, *, max_batch: int, seconds: float) -> None:
    """Refuse a model whose full batch has no room in the device's memory, or that warms up for longer than ``seconds``.

    Raises:
        BundleError: The message says what the model needs and which settings decide.
    """
    largest, took = cost_of_an_image(model)
    needed, free = ALIVE * largest * max_batch, free_bytes(model.device)
    size = " × ".join(map(str, model.preprocess.shape[1:]))
    if needed > free:
        raise BundleError(
            f"model {model.name!r}: a batch of {max_batch} images of {size} pixels needs about {needed / 2**30:.1f} "
            f"GiB, {free / 2**30:.1f} GiB are free; lower --max-batch-size, or fit the network for smaller images"
        )
    if 2 * max_batch * took > seconds:
        raise BundleError(
            f"model {model.name!r}: an image of {size} pixels takes {took:.1f} s, so warming up batches of {max_batch} "
            f"would take longer than {seconds:g} s; lower --max-batch-size or raise --warmup-seconds"
        )


@torch.inference_mode()
def cost_of_an_image(model: PSC) -> tuple[int, float]:
    """Bytes of the largest output of a module, and seconds, for one image."""
    largest = 0

    def measure(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    image = model.preprocess.noise().to(model.device)
    hook = register_module_forward_hook(measure)
    try:
        model.pipeline(image)
    finally:
        hook.remove()
    began = time.perf_counter()
    model.pipeline(image).cpu()
    return largest, time.perf_counter() - began


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of this machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        return min(free, int(_MEMORY_LIMIT.read_text()) - int(_MEMORY_USED.read_text()))
    except (OSError, ValueError):  # No control group, or "max".
        return free
