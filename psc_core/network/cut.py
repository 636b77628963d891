"""Cut a network after some of its layers, in its traced graph or with hooks.

:func:`cut_graph` traces the forward pass symbolically (torch.fx), ends it at the wanted layers and deletes everything
else; the result runs and compiles like any network.  :class:`HookedNetwork` is for networks that cannot be traced
(control flow on data): the network runs unchanged, and an exception stops it after the last wanted layer.

The output of a wanted layer is copied when its module returns, so that later modules cannot change it in place (as
``nn.ReLU(inplace=True)`` after a convolution would).  If a module is called several times, its last call counts.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.hooks import RemovableHandle

from psc_core.errors import NetworkError
from psc_core.network.layers import INPUT_SUFFIX, value_of


def shared_copy(net: nn.Module) -> nn.Module:
    """Copy ``net`` in evaluation mode; the copy shares its parameters and buffers."""
    # deepcopy takes every object in its memo for one that is already copied.
    return deep_copy(net, {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())})


def deep_copy(net: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Copy ``net`` in evaluation mode, except for objects whose id is in ``memo``."""
    memo = {} if memo is None else memo
    for tensor in _results(net):
        memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        twin = copy.deepcopy(net, memo)
    except Exception as error:  # An object's own copying may raise any error.
        raise NetworkError(f"{type(net).__name__} cannot be copied: {error}; remove {_uncopied(net)} before") from error
    return twin.eval()


def _results(net: nn.Module) -> Iterator[Tensor]:
    """Yield the tensors among the modules' attributes that a pass with gradients left there, which no copy accepts.

    Old-style spectral and weight normalisation and pruning keep the weight so, and other modules their activations.
    """
    waiting: list[Any] = [vars(module) for module in net.modules()]
    seen: set[int] = set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor) and not each.is_leaf:
            yield each
        elif isinstance(each, dict | list | tuple) and id(each) not in seen:
            seen.add(id(each))
            waiting += each.values() if isinstance(each, dict) else each


def _uncopied(net: nn.Module) -> str:
    """Return the names of the attributes that cannot be copied, and their types."""
    found = []
    for name, module in net.named_modules():
        own = {"_modules"} | ({*vars(module)} & {*vars(nn.Module())} - {"_buffers", "_parameters"})
        for attribute, value in vars(module).items():
            if attribute not in own and not isinstance(value, nn.Module):
                try:
                    copy.deepcopy(value, {id(tensor): tensor for tensor in _results(net)})
                except Exception:
                    place = f"{name}.{attribute}" if name else attribute
                    found.append(f"its attribute {place!r} (a {type(value).__name__})")
    return ", ".join(found) or "locks, open files and results of passes with gradients from its attributes"


# Tracing replaces methods of ``nn.Module`` for all threads, so only one trace may run at a time.
_one_trace = threading.Lock()


class _Recorder(fx.Tracer):
    """A tracer that copies the value of every wanted layer, and does not disturb networks that other threads run."""

    def __init__(self, wanted: Collection[str]) -> None:
        # A network that calls torchvision's operations has already imported them.
        ops = sys.modules.get("torchvision.ops")
        super().__init__(autowrap_modules=(math,) if ops is None else (math, ops))
        self.wanted = wanted
        self.values: dict[str, fx.Node] = {}
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # torch.fx replaces ``nn.Module.__call__`` for the whole process while it traces.
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if args:
            self._record(name + INPUT_SUFFIX, args[0])
        output = super().call_module(m, forward, args, kwargs)
        self._record(name, output)
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _record(self, name: str, output: Any) -> None:
        value = value_of(output)
        if name in self.wanted and isinstance(value, fx.Proxy):
            self.values[name] = value.clone().node


def cut_graph(net: nn.Module, layers: Sequence[str], *, keep_output: bool) -> fx.GraphModule:
    """Trace ``net`` and keep only the operations for ``layers``, and for the logits if ``keep_output``.

    The forward of the result returns a tuple: one tensor per layer in the order given, then the logits.
    """
    root = shared_copy(net)
    tracer = _Recorder(set(layers))
    try:
        with _one_trace:
            graph = tracer.trace(root)
    except Exception as error:
        raise NetworkError(f"{type(net).__name__} cannot be traced: {type(error).__name__}: {error}") from error
    if hidden := [name for name in layers if name not in tracer.values]:
        raise NetworkError(f"tracing {type(net).__name__} does not reach {', '.join(hidden)}")
    ending = graph.find_nodes(op="output")[0]
    outputs = [tracer.values[name] for name in layers]
    if keep_output:
        if not isinstance(ending.args[0], fx.Node):
            raise NetworkError(f"expected {type(net).__name__} to return only logits, got {ending.args[0]}")
        outputs.append(ending.args[0])
    order = list(graph.nodes)
    last = max(order.index(node) for node in outputs)
    # fx would delete an in-place operation whose result is unused, which is right only after the last output.
    mutations = {node for node in order[:last] if not node.users and mutates(node, root)}
    ending.args = (tuple(outputs),)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in mutations)
    for node in tracer.values.values():
        source = node.args[0]
        # A copy protects from later changes in place, which cannot happen if only the copy reads its source, so it is
        # removed.  A copy of the input stays, because the caller may change the input.
        if isinstance(source, fx.Node) and len(source.users) == 1 and source.op != "placeholder":
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    return fx.GraphModule(root, graph)


def mutates(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node whose result is unused changes one of its arguments in place."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return named or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


class _Stop(Exception):
    """Raised to end a forward pass when all wanted layers have been reached."""


class _Dropped(nn.Module):
    """A placeholder for a module that the wanted layers do not need."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, *_: Any, **__: Any) -> Tensor:
        raise NetworkError(
            f"this input needs {self.name}, which was dropped because the trial input did not need it; fit with "
            "predictions=base to keep the whole network"
        )


@dataclass(frozen=True)
class HookPlan:
    """The extent of a hooked forward pass, which by default runs to the end of the network."""

    stop: str | None = None  # the layer after which it ends
    dropped: tuple[str, ...] = ()  # outermost modules that it never enters


class HookedNetwork(nn.Module):
    """A copy of ``net`` that runs as far as ``plan`` says; hooks catch the outputs, so it is not thread-safe."""

    def __init__(self, net: nn.Module, layers: Sequence[str], plan: HookPlan, *, keep_output: bool) -> None:
        super().__init__()
        self.net = shared_copy(net)
        self.layers = tuple(layers)
        self.keep_output = keep_output
        self.stop = plan.stop
        for name in plan.dropped:
            parent, _, attribute = name.rpartition(".")
            setattr(self.net.get_submodule(parent), attribute, _Dropped(name))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return one tensor per layer, then the logits if ``keep_output``."""
        values: dict[str, Tensor] = {}

        def catch(name: str, _module: nn.Module, args: tuple[Any, ...], output: Any = None) -> None:
            value = args[0] if name.endswith(INPUT_SUFFIX) else value_of(output)
            if not isinstance(value, Tensor):
                raise NetworkError(f"expected a tensor from layer {name}, got {type(value).__name__}")
            # A later module may change the value in place.
            values[name] = value.clone()
            if name == self.stop:
                raise _Stop

        logits = None
        # Only an exception can end the forward pass of a network that cannot be traced.
        with ExitStack() as hooks, suppress(_Stop):
            for name in self.layers:
                hooks.enter_context(_attach(self.net, name, partial(catch, name)))
            logits = self.net(x)
        if missing := [name for name in self.layers if name not in values]:
            raise NetworkError(
                f"this input does not reach layer {', '.join(missing)}; choose a layer that all inputs reach"
            )
        features = tuple(values[name] for name in self.layers)
        if not self.keep_output:
            return features
        if not isinstance(logits, Tensor):
            raise NetworkError(f"expected the network to return only logits, got {type(logits).__name__}")
        return (*features, logits)


def _attach(net: nn.Module, name: str, hook: Callable[..., None]) -> RemovableHandle:
    module = net.get_submodule(name.removesuffix(INPUT_SUFFIX))
    return module.register_forward_pre_hook(hook) if name.endswith(INPUT_SUFFIX) else module.register_forward_hook(hook)


@torch.inference_mode()
def plan_stop(net: nn.Module, layers: Sequence[str], trial: Tensor) -> HookPlan:
    """Plan to stop after the last wanted layer and to drop the modules that are called only after it.

    The whole network runs if the trial input calls that layer more than once, because another input may call it more
    often.
    """
    events: list[str] = []
    entered: list[tuple[int, str]] = []

    def enter(name: str, *_: Any) -> None:
        entered.append((len(events), name))

    twin = shared_copy(net)
    for name, module in twin.named_modules():
        module.register_forward_pre_hook(partial(enter, name))
    for name in layers:
        _attach(twin, name, lambda *_, name=name: events.append(name))
    twin(trial)
    if not events or events.count(events[-1]) > 1:
        return HookPlan()
    before = {name for seen, name in entered if seen < len(events)}
    after = [name for seen, name in entered if seen == len(events) and name not in before]
    outermost = [name for name in dict.fromkeys(after) if not any(name.startswith(f"{other}.") for other in after)]
    return HookPlan(events[-1], tuple(outermost))
