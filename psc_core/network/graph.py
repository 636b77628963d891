"""Cut a network after some of its layers by tracing its graph.

The forward pass is traced symbolically (torch.fx) and ended at the wanted layers; whatever they do not need is deleted.
The result runs and compiles like any network.  The output of a wanted layer is copied when its module returns, so that
later modules cannot change it in place (as ``nn.ReLU(inplace=True)`` after a convolution would).  If a module is called
several times, its last call counts.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Collection, Sequence
from itertools import chain
from typing import Any

import torchvision
from torch import fx, nn

from psc_core.errors import NetworkError
from psc_core.network.layout import INPUT


def shared_copy(net: nn.Module) -> nn.Module:
    """A copy of ``net`` in evaluation mode that shares its parameters and buffers.

    Raises:
        NetworkError: The modules cannot be copied.
    """
    memo: dict[int, Any] = {id(tensor): tensor for tensor in chain(net.parameters(), net.buffers())}
    try:
        twin = copy.deepcopy(net, memo)
    except (TypeError, RuntimeError) as error:
        raise NetworkError(
            f"{type(net).__name__} cannot be copied: {error}; remove locks, open files and non-leaf tensors from its "
            "attributes"
        ) from error
    return twin.eval()


_one_trace = threading.Lock()
"""Tracing replaces methods of ``nn.Module`` for all threads, so two traces must not run at once."""


class _Recorder(fx.Tracer):
    """A tracer that copies the value of every wanted layer when its module is called.

    Networks that other threads run at the same time (a service that reloads) run as usual.
    """

    def __init__(self, wanted: Collection[str]) -> None:
        super().__init__(autowrap_modules=(math, torchvision.ops))
        self.wanted = wanted
        self.values: dict[str, fx.Node] = {}
        self._thread = threading.get_ident()

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        name = self.path_of_module(m)
        if args:
            self._record(name + INPUT, args[0])
        output = super().call_module(m, forward, args, kwargs)
        self._record(name, output)
        return output

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def _record(self, name: str, value: Any) -> None:
        if name in self.wanted and isinstance(value, fx.Proxy):
            self.values[name] = value.clone().node


def cut_graph(net: nn.Module, layers: Sequence[str], *, keep_output: bool) -> fx.GraphModule:
    """Trace ``net`` and keep only what computes ``layers``, and the logits if ``keep_output``.

    Returns:
        A module whose forward returns a tuple: one tensor per layer in the order given, then the logits.

    Raises:
        NetworkError: The forward pass cannot be traced, or a layer is inside a module that is traced as one operation.
    """
    root = shared_copy(net)
    tracer = _Recorder(set(layers))
    try:
        with _one_trace:
            graph = tracer.trace(root)
    except Exception as error:
        raise NetworkError(f"{type(net).__name__} cannot be traced: {type(error).__name__}: {error}") from error
    hidden = [name for name in layers if name not in tracer.values]
    if hidden:
        raise NetworkError(f"tracing {type(net).__name__} does not reach {', '.join(hidden)}")
    ending = graph.find_nodes(op="output")[0]
    outputs = [tracer.values[name] for name in layers]
    if keep_output:
        if not isinstance(ending.args[0], fx.Node):
            raise NetworkError(f"expected {type(net).__name__} to return only logits, got {ending.args[0]}")
        outputs.append(ending.args[0])
    order = list(graph.nodes)
    last = max(order.index(node) for node in outputs)
    mutations = {node for node in order[:last] if not node.users and mutates(node, root)}
    ending.args = (tuple(outputs),)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or node in mutations)
    for node in tracer.values.values():
        source = node.args[0]
        if isinstance(source, fx.Node) and len(source.users) == 1 and source.op != "placeholder":
            node.replace_all_uses_with(source)
            graph.erase_node(node)
    return fx.GraphModule(root, graph)


def mutates(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node whose result is unused changes one of its arguments."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return named or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None
