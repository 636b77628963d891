"""Check that a model can be warmed up on this machine, before warm-up takes minutes or all of the memory.

One image on PyTorch's meta device, which computes nothing, gives the number of operations and the size of the largest
feature map; a matrix product gives the speed of the device.  Warm-up runs batches of 1, 2, 4, … images, which have
twice the images of a full batch, and three feature maps of a batch are in memory at once.
"""

from __future__ import annotations

import logging
import math
import time
from copy import deepcopy
from typing import Any, Final, Self

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from app.memory import limits
from psc_core.errors import BundleError
from psc_core.model.base import FittedModel
from psc_core.network.onnx.body import OnnxBody

logger = logging.getLogger("psc.models")

ALIVE: Final = 3
"""The number of a batch's feature maps in memory at once: an operation's input and output, and a shortcut past it."""

EFFICIENCY: Final = 0.3
"""The speed of a network as a fraction of the speed of a matrix product."""

_SIDE: Final = 1024


def check_affordable(model: FittedModel, *, max_batch: int, seconds: float) -> None:
    """Refuse a model whose full batch does not fit in memory, or that takes longer than ``seconds`` to warm up.

    Raises:
        BundleError: If the model needs more memory or time; the message says how much, and which settings to change.
    """
    try:
        alive, operations = cost_of_an_image(model)
    except (RuntimeError, NotImplementedError):  # The meta device lacks an operation of a user's own network.
        logger.warning("the cost of the network is not known", extra={"model": model.name})
        return
    needed, free = alive * max_batch, free_bytes(model.device)
    size = " × ".join(map(str, model.preprocess.shape[1:]))
    if needed > free:
        raise BundleError(
            f"model {model.name!r}: a batch of {max_batch} images of {size} pixels needs about {needed / 2**30:.1f} "
            f"GiB, and {free / 2**30:.1f} GiB are free; lower --max-batch-size, or fit the network for smaller images"
        )
    expected = 2 * max_batch * operations / operations_per_second(model.device)
    if expected > seconds:
        raise BundleError(
            f"model {model.name!r}: warming up batches of {max_batch} images of {size} pixels would take about "
            f"{expected:.0f} s, longer than {seconds:g} s; lower --max-batch-size or raise --warmup-seconds"
        )


class _NoTracker(ModuleTracker):
    """Tracks no modules, because torch's tracker hooks all modules of the process, even those in service."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@torch.inference_mode()
def cost_of_an_image(model: FittedModel) -> tuple[int, int]:
    """Return the bytes in memory at once and the number of operations for one image.

    The bytes are :data:`ALIVE` times the largest output of a module.
    """
    if isinstance(model.backbone.body, OnnxBody) and model.backbone.body.cost is not None:
        return model.backbone.body.cost
    largest = 0

    def measure(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    network = deepcopy(model.backbone).to("meta")
    image = torch.empty(1, *model.preprocess.shape, device="meta")
    for module in network.modules():  # Of this copy alone: other models serve on other threads meanwhile.
        module.register_forward_hook(measure)
    counter = FlopCounterMode(display=False)
    counter.mod_tracker = _NoTracker()
    with counter:
        network(image)
    return ALIVE * largest, counter.get_total_flops()


def operations_per_second(device: torch.device) -> float:
    """Return the float32 operations per second, at :data:`EFFICIENCY`, of the faster of two matrix products."""
    factor = torch.ones(_SIDE, _SIDE, device=device)
    fastest = math.inf
    for _ in range(2):
        began = time.perf_counter()
        float((factor @ factor)[0, 0])
        fastest = min(fastest, time.perf_counter() - began)
    return EFFICIENCY * 2 * _SIDE**3 / fastest


def free_bytes(device: torch.device) -> int:
    """Return the bytes that can still be allocated on the GPU, or on this machine and in its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(limit - used for limit, used in limits())
