"""A GPU that is not there: tensors that say they are on it and compute on the host.

An operation that mixes them with the host's raises, as on CUDA, and only a copy moves them.  What this cannot show:
kernels, numbers, streams, time, memory, gradients.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU = torch.device("cuda:0")

aten: Any = torch.ops.aten

INDEXED = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default, aten.index_put.default}
POSITIONS = {torch.int64, torch.int32, torch.bool}  # may be on the host


class OnGpu(Tensor):
    """A tensor that is said to be on the GPU."""

    host: Tensor  # its values

    @staticmethod
    def __new__(cls, host: Tensor) -> "OnGpu":
        layout: dict[str, Any] = {"strides": host.stride(), "storage_offset": host.storage_offset()}
        there: OnGpu = Tensor._make_wrapper_subclass(cls, host.size(), dtype=host.dtype, device=GPU, **layout)  # type: ignore[attr-defined]
        there.host = host.detach()
        return there

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


class Pretend(TorchDispatchMode):
    """Lets functions that are given the device make such tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, kwargs or {})


def on_host(value: Any) -> Any:
    if isinstance(value, OnGpu):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def run(func: Any, args: Any, kwargs: Any) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    there = {id(tensor.host): tensor for tensor in tensors if isinstance(tensor, OnGpu)}
    asked = kwargs.get("device")
    is_there = bool(there) if asked is None else torch.device(asked).type == "cuda"
    copies = func in (aten._to_copy.default, aten.copy_.default)
    if there and not copies:
        positions = func in INDEXED and isinstance(args[0], OnGpu)
        for tensor in tensors:
            if not isinstance(tensor, OnGpu) and tensor.ndim and not (positions and tensor.dtype in POSITIONS):
                found = [(str(each.device), *each.shape) for each in tensors]
                raise RuntimeError(f"expected all tensors on one device: {func} of {found}")
    out = func(*tree_map(on_host, args), **tree_map(on_host, kwargs))
    if func is aten.copy_.default:
        return args[0]
    if not is_there:
        return out

    def placed(value: Any) -> Any:
        return there[id(value)] if id(value) in there else OnGpu(value) if isinstance(value, Tensor) else value

    return tree_map(placed, out)


@contextmanager
def pretend_gpu() -> Iterator[None]:
    """Let ``device="cuda"`` name the GPU that is not there, on this thread."""
    tensor, as_tensor, tolist = torch.tensor, torch.as_tensor, Tensor.tolist

    def made(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        return tensor(data, **more).to(device or "cpu")

    def adopted(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        found = data if isinstance(data, Tensor) else as_tensor(data, **more)
        return found.to(device=device or found.device, **more)

    def enter(self: Any) -> None:  # Views of such tensors cannot be inference tensors.
        self.inner = torch.set_grad_enabled(not self.mode)

    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "mem_get_info": lambda *_: (1 << 36, 1 << 36),
        "max_memory_allocated": lambda *_: 0,
        "is_bf16_supported": lambda *_: True,
        "amp.common.amp_definitely_not_available": lambda: False,
    }
    tensors = {
        "tolist": lambda self: tolist(self.cpu()),
        "new_tensor": lambda self, data, **more: made(data, **{"dtype": self.dtype, "device": self.device, **more}),
    }
    torch._C._ensureCUDADeviceGuardSet()  # type: ignore[attr-defined]
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for name, value in cuda.items():
            stack.enter_context(patch(f"torch.cuda.{name}", value))
        for name, method in tensors.items():
            stack.enter_context(patch.object(Tensor, name, method))
        stack.enter_context(patch.object(torch, "tensor", made))
        stack.enter_context(patch.object(torch, "as_tensor", adopted))
        stack.enter_context(patch.object(torch.inference_mode, "__enter__", enter))
        stack.enter_context(patch.object(torch.inference_mode, "__exit__", lambda self, *_: self.inner.__exit__(*_)))
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        stack.enter_context(Pretend())
        yield
