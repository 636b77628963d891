"""Find out whether a model can be warmed up here at all, before minutes or the machine's memory are spent on it.

Without computing anything (on PyTorch's meta device) one image tells how many operations it takes and how large its
largest feature map is; a matrix product tells how fast the device is.  Warming up runs batches of 1, 2, 4, … images,
together twice a full one, and three feature maps of a batch are alive at once.
"""

from __future__ import annotations

import logging
import math
import time
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.flop_counter import FlopCounterMode

from app.memory import limits
from psc_core.errors import BundleError
from psc_core.model.base import FittedModel
from psc_core.network.onnx.body import OnnxBody

logger = logging.getLogger("psc.models")

ALIVE: Final = 3
"""Feature maps of a batch in memory at once: input and output of an operation, and a shortcut around it."""

EFFICIENCY: Final = 0.3
"""Speed of a network as a fraction of that of a matrix product."""

_SIDE: Final = 1024


def check_affordable(model: FittedModel, *, max_batch: int, seconds: float) -> None:
    """Refuse a model whose full batch has no room in the device's memory, or that warms up for longer than ``seconds``.

    Raises:
        BundleError: The message says what the model needs and which settings decide.
    """
    try:
        alive, operations = cost_of_an_image(model)
    except (RuntimeError, NotImplementedError):  # A network of the user's own that the meta device does not know.
        logger.warning("cost of the network not known", extra={"model": model.name})
        return
    needed, free = alive * max_batch, free_bytes(model.device)
    size = " × ".join(map(str, model.preprocess.shape[1:]))
    if needed > free:
        raise BundleError(
            f"model {model.name!r}: a batch of {max_batch} images of {size} pixels needs about {needed / 2**30:.1f} "
            f"GiB, {free / 2**30:.1f} GiB are free; lower --max-batch-size, or fit the network for smaller images"
        )
    expected = 2 * max_batch * operations / operations_per_second(model.device)
    if expected > seconds:
        raise BundleError(
            f"model {model.name!r}: warming up batches of {max_batch} images of {size} pixels would take about "
            f"{expected:.0f} s, longer than {seconds:g} s; lower --max-batch-size or raise --warmup-seconds"
        )


@torch.inference_mode()
def cost_of_an_image(model: FittedModel) -> tuple[int, int]:
    """Bytes in memory at once, :data:`ALIVE` times the largest output of a module, and operations, for one image."""
    if isinstance(model.backbone.body, OnnxBody) and model.backbone.body.cost is not None:
        return model.backbone.body.cost
    largest = 0

    def measure(_module: nn.Module, _inputs: Any, output: Any) -> None:
        nonlocal largest
        if isinstance(output, Tensor):
            largest = max(largest, output.nbytes)

    network = deepcopy(model.backbone).to("meta")
    image = torch.empty(1, *model.preprocess.shape, device="meta")
    hook = register_module_forward_hook(measure)
    try:
        with FlopCounterMode(display=False) as counter:
            network(image)
    finally:
        hook.remove()
    return ALIVE * largest, counter.get_total_flops()


def operations_per_second(device: torch.device) -> float:
    """Return the float32 operations a second at :data:`EFFICIENCY` of a matrix product, the better of two."""
    factor = torch.ones(_SIDE, _SIDE, device=device)
    fastest = math.inf
    for _ in range(2):
        began = time.perf_counter()
        float((factor @ factor)[0, 0])
        fastest = min(fastest, time.perf_counter() - began)
    return EFFICIENCY * 2 * _SIDE**3 / fastest


def free_bytes(device: torch.device) -> int:
    """Memory that can still be allocated: of the GPU, or of this machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(limit - used for limit, used in limits())
