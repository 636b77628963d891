"""Copy a network that lives in this process into one that can be read layer by layer."""

from __future__ import annotations

from itertools import chain
from typing import Final

import torch
from torch import nn

from psc_core.errors import NetworkError, UsageError
from psc_core.network.cut import deep_copy
from psc_core.network.described.hugging_face import Logits

_TRANSFORMERS_INPUT: Final = "pixel_values"
"""What transformers' networks for images call their input."""


def readable_copy(net: object) -> nn.Module:
    """Return a copy of ``net`` in evaluation mode and single precision that returns logits and can be hooked.

    ``torch.compile``, ``DataParallel`` and ``DistributedDataParallel`` run the same network faster, but hide its
    layers; the network inside them is copied.  A classifier of transformers gives its logits alone.

    Example:
        >>> readable_copy(nn.DataParallel(nn.Linear(2, 3).half())).weight.dtype
        torch.float32

    Raises:
        UsageError: If ``net`` is no module.
        NetworkError: If it is TorchScript, or cannot be copied.
    """
    if not isinstance(net, nn.Module):
        raise UsageError(
            f"expected a network, that is an nn.Module, got a {type(net).__name__}; build one and load its weights, as "
            'load_network("torchvision:resnet50", weights="net.pth", num_classes=…) does'
        )
    net = _unwrapped(net)
    if isinstance(net, torch.jit.ScriptModule):
        raise NetworkError(
            "the network is TorchScript, whose layers cannot be read; give the nn.Module that it was made from, or an "
            'ONNX file, load_network("onnx:net.onnx")'
        )
    copied = deep_copy(net)
    if any(tensor.dtype in (torch.half, torch.bfloat16, torch.double) for tensor in copied.parameters()):
        copied = copied.float()
    return Logits(copied) if getattr(copied, "main_input_name", None) == _TRANSFORMERS_INPUT else copied


def device_of(net: nn.Module) -> torch.device:
    """Return the device that the network is on."""
    return next(chain(net.parameters(), net.buffers()), torch.empty(0)).device


def _unwrapped(net: nn.Module) -> nn.Module:
    """Return the network inside the modules that only run it."""
    while True:
        if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
            inner = net.module
        else:
            inner = getattr(net, "_orig_mod", None)  # As torch.compile names it, in every state dict too.
        if not isinstance(inner, nn.Module):
            return net
        net = inner
