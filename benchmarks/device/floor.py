"""Lower bounds of a step: floating-point operations by formula, bytes that its operations read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


class Traffic(TorchDispatchMode):
    """Sums the bytes of all operations' arguments and results, except views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not getattr(func, "is_view", False):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
            self.bytes += sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)
        return out


@torch.no_grad()
def operations(network: Any, images: Tensor) -> int:
    """Floating-point operations of matrix products and convolutions (multiply and add count as two)."""
    with FlopCounterMode(display=False) as counter:
        network(images)
    return int(counter.get_total_flops())


@torch.no_grad()
def traffic(network: Any, images: Tensor) -> int:
    """Bytes that the operations of a step read and write."""
    with Traffic() as counter:
        network(images)
    return counter.bytes
