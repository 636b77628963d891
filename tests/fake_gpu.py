"""A step on a GPU that is not there: PyTorch's fake tensors say which operation would wait or lie on the wrong device.

Fake tensors have a shape, a type and a device, but no values, so a network runs "on CUDA" anywhere, in a moment.  What
they cannot show: kernels, numbers, time, memory.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psc_core.model import PSC
from psc_core.pipeline import Pipeline
from psc_core.settings import Precision

GPU = torch.device("cuda:0")

Module = TypeVar("Module", bound=nn.Module)

aten: Any = torch.ops.aten

READS = {aten._local_scalar_dense.default, aten.equal.default}  # wait for the device and give a value
CHECKS = {aten._linalg_check_errors.default}  # wait for it and give nothing
COPIES = {aten._to_copy.default, aten.copy_.default}


class Watch(TorchDispatchMode):
    """Notes what a CUDA graph could not capture: reads of the device, which give "true", and tensors on the host.

    A scalar is none: kernels take it as an argument.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.crossings: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READS | CHECKS:
            self.waits.append(str(func))
            return True if func in READS else None
        out = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, Tensor)]
        if any(tensor.device != GPU and (tensor.ndim or func in COPIES) for tensor in tensors):
            self.crossings.append(f"{func} of {[(str(tensor.device), *tensor.shape) for tensor in tensors]}")
        return out


@contextmanager
def gpu(fake: FakeTensorMode) -> Iterator[Watch]:
    """Inference on the fake GPU, bfloat16 autocast included, watched."""
    available = patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False)
    has_bf16 = patch("torch.cuda.is_bf16_supported", return_value=True)
    with available, has_bf16, fake, torch.no_grad(), Watch() as watch:  # Inference mode hides operations in others.
        yield watch


def moved(net: Module, fake: FakeTensorMode) -> Module:
    """A copy whose parameters and buffers are fake and on the GPU, as ``.to("cuda")`` leaves them."""
    twin = copy.deepcopy(net)
    for module in twin.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    with fake:
                        there = fake.from_tensor(tensor).detach().to(GPU)
                    tensors[name] = nn.Parameter(there, False) if isinstance(tensor, nn.Parameter) else there
    return twin


def on_gpu(psc: PSC, precision: Precision, fake: FakeTensorMode) -> Pipeline:
    """The pipeline that :meth:`PSC.load` builds on a GPU: its backbone is fused there."""
    pipeline, backbone = moved(psc.pipeline, fake), moved(psc.backbone, fake)
    with fake:
        return pipeline.with_backbone(backbone.fused(precision))


def assert_steps_on_gpu(psc: PSC, precision: Precision, images: int = 3) -> None:
    """Outputs and explanations of a batch stay on the GPU; a traced network neither waits nor crosses to the host."""
    fake = FakeTensorMode()
    pipeline = on_gpu(psc, precision, fake)
    with gpu(fake) as watch:
        batch = torch.zeros((images, *psc.preprocess.shape), dtype=torch.uint8, device=GPU)
        packed = pipeline(batch).float()
        again, explanation = pipeline.explain(batch)
    assert packed.shape == again.shape == psc.predict(torch.zeros(batch.shape, dtype=torch.uint8)).outputs.packed.shape
    assert explanation and {part.device for part in (packed, again, *explanation.values())} == {GPU}
    assert watch.crossings == []
    assert pipeline.is_traced != bool(watch.waits), watch.waits
