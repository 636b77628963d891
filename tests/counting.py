"""What a step asks of the device, counted: operations, fresh memory, copies between devices, waits for the host."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "_cdist_forward")
"""Operations that are a matrix product or a convolution."""

SYNCHRONISING = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "equal", "masked_select", "unique", "_unique2")
"""Operations whose result the host waits for."""


class Counts(TorchDispatchMode):
    """Counts what runs inside; use it under ``torch.no_grad``, where composite operations come apart.

    Attributes:
        kernels: Calls by name, views left out.
        fresh: Output tensors in memory that no argument had.
        fresh_bytes: Their bytes.
        copied_bytes: Bytes that went from one device to another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.fresh = self.fresh_bytes = self.copied_bytes = 0

    @property
    def products(self) -> int:
        """Matrix products and convolutions."""
        return sum(self.kernels[name] for name in PRODUCTS)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        out = func(*args, **(kwargs or {}))
        if func.is_view or func.overloadpacket.__name__ == "_unsafe_view":
            return out
        self.kernels[func.overloadpacket.__name__] += 1
        known = {_memory(tensor) for tensor in given}
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and _memory(tensor) not in known:
                self.fresh += 1
                self.fresh_bytes += tensor.numel() * tensor.dtype.itemsize
        devices = {tensor.device for tensor in [*given, *tree_leaves(out)] if isinstance(tensor, Tensor)}
        if len(devices) > 1:
            self.copied_bytes += out.numel() * out.dtype.itemsize
        return out


def _memory(tensor: Tensor) -> int:
    """What tells two tensors' memory apart."""
    return tensor.untyped_storage().data_ptr()
