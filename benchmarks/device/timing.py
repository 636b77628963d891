"""Time variants side by side, and estimate lower bounds of a step.

Variants take turns, so that other load on the machine affects all of them.  The bounds are floating-point operations by
formula at the speed of a plain matrix product, and the bytes that operations read and write at that of a plain copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from statistics import median, quantiles
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode


def take_turns(
    variants: Mapping[str, Callable[[], Any]], *, seconds: float, rounds: tuple[int, int]
) -> dict[str, list[float]]:
    """Time each call by variant; the n-th calls of all variants belong to one round."""
    for call in variants.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in variants}
    until = time.perf_counter() + seconds
    names = list(variants)
    done = 0
    while done < rounds[0] or (done < rounds[1] and time.perf_counter() < until):
        for name in names if done % 2 else reversed(names):
            began = time.perf_counter()
            variants[name]()
            times[name].append(time.perf_counter() - began)
        done += 1
    return times


def ratio(over: list[float], under: list[float]) -> list[float]:
    """Return the median and quartiles of the ratios of two variants' seconds, taken within rounds."""
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    low, _, high = quantiles(ratios, n=4, method="inclusive")
    return [round(value, 4) for value in (median(ratios), low, high)]


def milliseconds(times: list[float]) -> float:
    return round(median(times) * 1e3, 4)


@torch.inference_mode()
def on_device(function: Callable[[], Any], device: torch.device, *, repeat: int = 20) -> tuple[Callable[[], None], int]:
    """Return a call that runs ``function`` on the device and waits, and how often it runs it.

    On CUDA a graph of ``repeat`` copies is captured, so that launching and waiting do not count.
    """
    if device.type != "cuda":
        return lambda: function(), 1
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(repeat):
            function()

    @torch.inference_mode()
    def run() -> None:
        graph.replay()
        torch.cuda.synchronize(device)

    return run, repeat


def peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations/s of a plain matrix product."""
    side = 8192 if device.type == "cuda" else 1536
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    out: Tensor = a @ b
    call, repeat = on_device(lambda: torch.mm(a, b, out=out), device)
    times = take_turns({"product": call}, seconds=1.0, rounds=(5, 50))["product"]
    return 2.0 * side**3 * repeat / median(times)


def bandwidth(device: torch.device) -> float:
    """Return the bytes/s read and written by a plain copy too large for the caches."""
    count = 1 << (30 if device.type == "cuda" else 26)
    a = torch.zeros(count, device=device)
    b = torch.empty_like(a)
    call, repeat = on_device(lambda: b.copy_(a), device)
    times = take_turns({"copy": call}, seconds=1.0, rounds=(5, 50))["copy"]
    return 8.0 * count * repeat / median(times)


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
    """Return the floating-point operations of matrix products and convolutions (multiply and add count as two)."""
    with FlopCounterMode(display=False) as counter:
        network(images)
    return int(counter.get_total_flops())


@torch.no_grad()
def traffic(network: Any, images: Tensor) -> int:
    """Return the bytes that the operations of a step read and write."""
    with Traffic() as counter:
        network(images)
    return counter.bytes
