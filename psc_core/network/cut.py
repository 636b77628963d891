"""Cut a network after some of its layers, as a module that a bundle can rebuild.

The forward pass is traced symbolically (torch.fx) and ends at the wanted layers; the result runs and compiles like any
network.  A network that cannot be traced (control flow on data) runs unchanged, with hooks, and an exception stops it.

The output of a wanted layer is copied when its module returns, so that later modules cannot change it in place (as
``nn.ReLU(inplace=True)`` after a convolution would).  If a module is called several times, its last call counts.

A bundle stores :meth:`Backbone.spec` and the state dict, but no code and no weights beyond the cut.

What serves is a copy that runs fewer operations, :func:`fuse`: three rewrites of the traced graph, applied only where
they change nothing but rounding.

* Each ``view`` becomes a ``reshape``, which gives the same values for channels-last maps, where ``view`` raises;
  :func:`reads_strides` finds the networks where that is not enough.
* Batch normalisation after a convolution is folded into its weights (in float64, then rounded once).
* Convolution weights are stored channels-last where that is faster, and for bfloat16 the weights of convolutions and
  linear layers are rounded once instead of by autocast in every step.
"""

from __future__ import annotations

import copy
import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, cast

import torch
from jaxtyping import Float
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils.hooks import RemovableHandle

from psc_core.errors import BundleError, NetworkError, UsageError, hint
from psc_core.images.preprocess import Inputs, Preprocess
from psc_core.network.described import Logits, NetworkSpec
from psc_core.network.layers import (
    INPUT_SUFFIX,
    Layout,
    canonical,
    has_tokens_first,
    layout_of,
    list_layers,
    value_of,
)
from psc_core.network.load import BUILT_BY_HAND, bounded_size, build, spec_of
from psc_core.network.onnx import OnnxBody, OnnxNetwork
from psc_core.network.output import check_same
from psc_core.network.weights import load_weights
from psc_core.settings import Precision


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
    """Yield tensors that a pass with gradients left in attributes, such as weights of old-style normalisation."""
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


_one_trace = threading.Lock()  # tracing replaces methods of ``nn.Module`` for all threads


class _Recorder(fx.Tracer):
    """A tracer that copies the value of every wanted layer, and does not disturb networks that other threads run."""

    def __init__(self, wanted: Collection[str] = ()) -> None:  # torch.fx unpickles without arguments
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
    """Keep only the operations for ``layers`` and, if ``keep_output``, the logits; forward returns them as a tuple."""
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
    name = _name(node)
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
            "predictions=original to keep the whole network"
        )


@dataclass(frozen=True)
class HookPlan:
    """The extent of a hooked forward pass, which by default runs to the end of the network."""

    stop: str | None = None  # the layer after which it ends
    dropped: tuple[str, ...] = ()  # outermost modules that it never enters


class HookedNetwork(nn.Module):
    """A copy of ``net`` that runs as far as ``plan`` says; hooks catch the outputs, so threads take turns."""

    def __init__(self, net: nn.Module, layers: Sequence[str], plan: HookPlan, *, keep_output: bool) -> None:
        super().__init__()
        self.net = shared_copy(net)
        self.layers = tuple(layers)
        self.keep_output = keep_output
        self.stop = plan.stop
        self._turn = threading.Lock()
        for name in plan.dropped:
            parent, _, attribute = name.rpartition(".")
            setattr(self.net.get_submodule(parent), attribute, _Dropped(name))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_turn": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._turn = threading.Lock()  # which cannot be copied

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
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
        with self._turn, ExitStack() as hooks, suppress(_Stop):
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
    """Plan to stop after the last wanted layer, if it is called once, and to drop modules that are called later."""
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


FeatureStep = Callable[[Tensor], list[Tensor]]
# The canonical features (batch, channels, spatial) of each layer, and the logits if they are kept.
FeaturesAndOutput = tuple[list[Float[Tensor, "batch _ _"]], Float[Tensor, "batch classes"] | None]
_CUT_ERROR = 1e-5  # maximum difference between the traced and the original network, relative to the largest value


@dataclass(frozen=True)
class Cut:
    """A cut through a network: by a graph that many threads may run, or by hooks, for which they take turns."""

    layers: tuple[str, ...]
    layouts: tuple[Layout, ...] | None  # where each layer has its channels; None if the body gives canonical features
    keep_output: bool  # whether the body also returns the logits
    hooks: HookPlan | None  # None for a graph
    network: NetworkSpec | None  # how to build the whole network; None if no name builds it
    tokens_first: tuple[str, ...] = ()  # layers whose modules return (T, B, C)


class Backbone(nn.Module):
    """A cut network that returns the canonical features of each layer, and the logits if they are kept."""

    def __init__(
        self,
        body: nn.Module,
        cut: Cut,
        memory_format: torch.memory_format = torch.contiguous_format,
        precision: Precision = "fp32",
    ) -> None:
        super().__init__()
        self.body = body
        self.cut = cut
        self.memory_format = memory_format
        self.precision = precision
        self.eval()

    @property
    def layers(self) -> tuple[str, ...]:
        return self.cut.layers

    @property
    def keep_output(self) -> bool:
        return self.cut.keep_output

    @property
    def is_traced(self) -> bool:
        """True if the body is a PyTorch graph, which several threads may run and CUDA graphs can capture."""
        return not self.has_hooks and self.onnx is None

    @property
    def has_hooks(self) -> bool:
        """True if the body is cut by hooks, so that threads take turns."""
        return self.cut.hooks is not None

    @property
    def onnx(self) -> bytes | None:
        """The ONNX model that the body runs; None for a PyTorch network."""
        return self.body.model if isinstance(self.body, OnnxBody) else None

    @property
    def network(self) -> NetworkSpec:
        if self.cut.network is None:
            raise NetworkError(BUILT_BY_HAND)
        return self.cut.network

    def forward(self, x: Inputs) -> FeaturesAndOutput:
        outputs = self.body(x.contiguous(memory_format=self.memory_format))
        kept = outputs[-1] if self.keep_output else None
        if self.cut.layouts is None:
            return list(outputs[: len(self.layers)]), kept
        features = []
        for name, layout, output in zip(self.layers, self.cut.layouts, outputs, strict=False):
            output = output.transpose(0, 1) if name in self.cut.tokens_first else output
            form = layout.form(output.shape)
            if form is None:
                raise NetworkError(
                    f"expected a map, tokens or a vector after {name}, got the shape {tuple(output.shape)}"
                )
            features.append(canonical(output, form))
        return features, kept

    def fused(self, precision: Precision) -> Backbone:
        """Return a faster copy with the same features up to rounding, not for storing."""
        if self.onnx is not None and precision != "fp32":
            raise NetworkError(f"an ONNX network computes in float32, got precision {precision}; leave it out")
        return Backbone(fuse(self.body, precision=precision), self.cut, images_format(self.body, precision), precision)

    def spec(self) -> dict[str, Any]:
        """Return what :func:`rebuild_backbone` needs besides the state dict, as JSON types."""
        hooks = self.cut.hooks
        return {
            "network": None if self.onnx is not None else self.network.to_json(),
            "layers": list(self.layers),
            "keep_output": self.keep_output,
            "hooks": None if hooks is None else {"stop": hooks.stop, "dropped": list(hooks.dropped)},
            **({"tokens_first": list(self.cut.tokens_first)} if self.cut.tokens_first else {}),
        }


def trial_input(preprocess: Preprocess) -> Inputs:
    """Return a standardised image of noise, the same on every call, for uses without real images."""
    return preprocess.standardise(preprocess.noise())


def cut_network(net: nn.Module, layers: Sequence[str], *, keep_output: bool, hooks: HookPlan | None = None) -> Backbone:
    """Cut ``net`` by its graph, or by ``hooks`` if given; raise :class:`NetworkError` if that fails."""
    if hooks is None:
        body: nn.Module = cut_graph(net, layers, keep_output=keep_output)
    else:
        body = HookedNetwork(net, layers, hooks, keep_output=keep_output)
    layouts = tuple(layout_of(net, name) for name in layers)
    return Backbone(body, Cut(tuple(layers), layouts, keep_output, hooks, spec_of(net)))


def onnx_backbone(body: OnnxBody, layers: Sequence[str], *, keep_output: bool) -> Backbone:
    """Return the backbone of an ONNX graph that gives canonical features of ``layers``, then the logits if kept."""
    return Backbone(body, Cut(tuple(layers), None, keep_output, None, None))


def truncate(net: nn.Module, layers: Sequence[str], *, keep_output: bool, trial: Inputs | None = None) -> Backbone:
    """Cut ``net`` after ``layers``, sharing its weights; a ``trial`` checks the trace, and hooks cut where it fails."""
    if isinstance(net, OnnxNetwork):
        if trial is None:
            raise NetworkError("an ONNX network is cut for images of one size; pass a trial input")
        return onnx_backbone(net.cut(layers, trial, keep_output=keep_output), layers, keep_output=keep_output)
    modules = dict(net.named_modules())
    for name in layers:
        if name.removesuffix(INPUT_SUFFIX) not in modules or not name:
            near = hint(name, list(modules), "see list_layers")
            raise NetworkError(f"{type(net).__name__} has no layer {name!r}; {near}")
    if len(set(layers)) != len(layers) or not layers:
        raise NetworkError(f"expected at least one layer, each once, got {list(layers)}")
    if trial is not None:
        trial = trial.to(next(net.parameters(), trial).device)
    try:
        backbone = cut_network(net, layers, keep_output=keep_output)
        if trial is None:
            return backbone
        if _agrees(backbone, net, trial):
            return _with_axes(backbone, trial)
        reason = "the traced graph gives other values"
    except NetworkError as error:
        reason = str(error)
    if trial is None:
        raise NetworkError(f"{reason}; pass a trial input to cut the network by hooks")
    hooks = HookPlan() if keep_output else plan_stop(net, layers, trial)
    if spec_of(net) is None:
        hooks = HookPlan(hooks.stop)  # an export cannot follow a pass that an exception stops
    backbone = cut_network(net, layers, keep_output=keep_output, hooks=hooks)
    with torch.inference_mode():  # a network that agrees with its trace has no random outputs
        for first, second in zip(backbone.body(trial), backbone.body(trial), strict=True):
            check_same(first, second)
    return _with_axes(backbone, trial)


@torch.inference_mode()
def _with_axes(backbone: Backbone, trial: Tensor) -> Backbone:
    """Return the backbone, which knows now which layers have tokens before images."""
    alone = backbone.body(trial)
    if any(each.ndim == 3 and each.shape[1] == 1 for each in alone):
        together = backbone.body(torch.cat([trial] * 3))
        shapes = zip(backbone.layers, alone, together, strict=False)
        first = tuple(name for name, one, three in shapes if has_tokens_first(one.shape, three.shape, 3))
        backbone.cut = replace(backbone.cut, tokens_first=first)
    return backbone


@torch.inference_mode()
def _agrees(backbone: Backbone, net: nn.Module, trial: Tensor) -> bool:
    """Return whether the traced and the original network agree on a batch of one image and a batch of three."""
    reference = HookedNetwork(net, backbone.layers, HookPlan(), keep_output=backbone.keep_output)
    for batch in (trial, torch.cat([trial, trial.flip(-1), 0.5 * trial])):
        try:
            traced = backbone.body(batch)
        except Exception:
            return False
        for got, expected in zip(traced, reference(batch), strict=True):
            # A trace loses an autocast inside the network, which shows in the type of what it returns.
            if got.shape != expected.shape or got.dtype != expected.dtype:
                return False
            scale = float(expected.abs().max()) if expected.numel() else 0.0
            if not torch.allclose(got, expected, rtol=0, atol=_CUT_ERROR * scale):
                return False
    return True


def rebuild_backbone(
    spec: Mapping[str, Any], state: Mapping[str, Tensor], allow_factories: Collection[str] = ()
) -> Backbone:
    """Restore a backbone from :meth:`Backbone.spec` and its state dict; global random state does not change."""
    network = NetworkSpec(**spec["network"])
    if network.is_factory and network.spec not in allow_factories:
        raise NetworkError(
            f"the factory {network.spec} is not on the allow-list {sorted(allow_factories)}; importing it runs its "
            f"code, so allow it only if you trust it: --allow-factories {network.spec}, or allow_factories in Python"
        )
    with torch.random.fork_rng(devices=[]), torch.no_grad(), bounded_size(network):
        net = build(network)
    hooks = spec["hooks"] and HookPlan(spec["hooks"]["stop"], tuple(spec["hooks"]["dropped"]))
    backbone = cut_network(net, spec["layers"], keep_output=spec["keep_output"], hooks=hooks)
    backbone.cut = replace(backbone.cut, tokens_first=tuple(spec.get("tokens_first", ())))
    for key, tensor in backbone.state_dict().items():
        if key in state and state[key].dtype != tensor.dtype:
            raise BundleError(f"expected {key} of type {tensor.dtype}, got {state[key].dtype}; fit the bundle again")
    load_weights(backbone, state, num_classes=network.num_classes, origin="the bundle's backbone")
    return backbone


def feature_step(backbone: Backbone, precision: Precision) -> FeatureStep:
    """Return a function from images to features, of the network fused as in serving."""
    running = backbone.fused(precision)
    return lambda images: running(images)[0]


def fused_network(net: nn.Module, trial: Inputs, precision: Precision) -> Callable[[Tensor], Tensor]:
    """Return the whole network fused as in serving, with the same output up to rounding; itself if it has no graph."""
    try:
        layer = list_layers(net, trial)[0].name
        backbone = truncate(net, [layer], keep_output=True, trial=trial)
    except NetworkError:
        return net
    if not backbone.is_traced:
        return net
    running = backbone.fused(precision)
    return lambda images: running(images)[1]


def readable_copy(net: object) -> nn.Module:
    """Copy a network, or that in a wrapper such as ``DataParallel``, in evaluation mode and float32, with logits."""
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
    is_of_transformers = getattr(copied, "main_input_name", None) == "pixel_values"
    return Logits(copied) if is_of_transformers else copied


def device_of(net: nn.Module) -> torch.device:
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


_RESHAPES: Final = {"view": "reshape", "view_as": "reshape_as"}
# Operations that give a view of contiguous maps and a copy of channels-last ones.
_MAY_COPY: Final = frozenset({*_RESHAPES, *_RESHAPES.values(), "flatten", "Flatten", "ravel", "contiguous"})

_READ_STRIDES: Final = frozenset(
    {"as_strided", "as_strided_", "stride", "storage_offset", "is_contiguous", "resize_", "view_as_complex"}
)

# Packages whose functions do not depend on strides; those of others, wrapped for torch.fx, may use a ``view``.
_KNOWN: Final = frozenset({"torch", "torchvision", "timm", "operator", "_operator", "math", "builtins"})


def reads_strides(net: fx.GraphModule) -> bool:
    """Return whether the values of ``net`` may depend on strides even after :func:`reshape_views`."""
    return any(_reads_strides(node) or _may_change_a_copy(node, net) for node in net.graph.nodes)


def reshape_views(net: fx.GraphModule) -> None:
    """Replace each ``view`` of ``net`` that gives another shape by a ``reshape``."""
    for node in net.graph.nodes:
        if node.op == "call_method" and node.target in _RESHAPES and not _reads_strides(node):
            node.target = _RESHAPES[node.target]


def _reads_strides(node: fx.Node) -> bool:
    if node.op not in ("call_method", "call_function"):
        return False
    # A view may be told a dtype, in place of a shape or by name.
    reinterprets = _name(node) in _RESHAPES and (bool(node.kwargs) or isinstance(node.args[-1], torch.dtype))
    package = (getattr(node.target, "__module__", None) or "torch").partition(".")[0]
    opaque = node.op == "call_function" and package not in _KNOWN
    return reinterprets or opaque or _name(node) in _READ_STRIDES


def _may_change_a_copy(node: fx.Node, net: fx.GraphModule) -> bool:
    """Return whether a node changes in place what may be a view or a copy of something that is read later."""
    if node.op not in ("call_module", "call_method", "call_function") or not mutates(node, net):
        return False
    out = node.kwargs.get("out")
    changed = out if isinstance(out, fx.Node) else node.all_input_nodes[0]
    name = type(net.get_submodule(str(changed.target))).__name__ if changed.op == "call_module" else _name(changed)
    return name in _MAY_COPY and any(node < user for user in changed.all_input_nodes[0].users)


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")


def fuse(body: nn.Module, *, precision: Precision) -> nn.Module:
    """Return a copy of a traced ``body`` with fewer, faster operations for its device; any other body as it is."""
    if not isinstance(body, fx.GraphModule):
        return body
    twin = cast(fx.GraphModule, shared_copy(body))
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    with torch.inference_mode(False), torch.no_grad():
        reshape_views(twin)
        _fold_batch_norm(twin)
        _copy_weights(twin, dtype, images_format(body, precision))
    twin.graph.lint()
    twin.recompile()
    return twin


def images_format(body: nn.Module, precision: Precision) -> torch.memory_format:
    """Return the memory format for images: channels-last for oneDNN, and for tensor cores, which float32 lacks."""
    if not isinstance(body, fx.GraphModule) or reads_strides(body):
        return torch.contiguous_format
    on_cpu = all(parameter.device.type == "cpu" for parameter in body.parameters())
    return torch.channels_last if on_cpu or precision == "bf16" else torch.contiguous_format


def _fold_batch_norm(net: fx.GraphModule) -> None:
    for node, convolution in list(_convolutions(net)):
        norm_node = next(iter(node.users), node)
        if len(node.users) != 1 or norm_node.op != "call_module" or len(norm_node.args) != 1 or norm_node.kwargs:
            continue
        norm = net.get_submodule(str(norm_node.target))
        if type(norm) is not nn.BatchNorm2d or norm.running_mean is None or norm.running_var is None or _hooked(norm):
            continue
        parts = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        wide = [part.detach().double() if isinstance(part, Tensor) else part for part in parts]
        bias = None if convolution.bias is None else convolution.bias.detach().double()
        weight, shift = fuse_conv_bn_weights(convolution.weight.detach().double(), bias, *wide)  # type: ignore[arg-type]
        _replace_weights(net, node, weight.float(), shift.float())
        norm_node.replace_all_uses_with(node)
        net.graph.erase_node(norm_node)


def _copy_weights(net: fx.GraphModule, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """Give convolutions and linear layers copies of their weights, in this dtype and memory format."""
    for node, convolution in list(_convolutions(net)):
        weight = convolution.weight.detach().to(dtype).contiguous(memory_format=memory_format)
        _replace_weights(net, node, weight, convolution.bias)
    for node in _called_once(net):
        module = net.get_submodule(str(node.target))
        if type(module) is nn.Linear and not _hooked(module) and module.weight.dtype == torch.float32 != dtype:
            _replace_weights(net, node, module.weight.detach().to(dtype), module.bias)


def _called_once(net: fx.GraphModule) -> list[fx.Node]:
    """Return the calls of modules that are called only once, under any name."""
    nodes = [node for node in net.graph.nodes if node.op == "call_module"]
    modules = [id(net.get_submodule(str(node.target))) for node in nodes]
    return [node for node, module in zip(nodes, modules, strict=True) if modules.count(module) == 1]


def _convolutions(net: fx.GraphModule) -> Iterator[tuple[fx.Node, nn.Conv2d]]:
    """Yield the calls of plain float32 2-D convolutions; those with hooks may compute the weight, and are skipped."""
    for node in _called_once(net):
        module = net.get_submodule(str(node.target))
        if type(module) is not nn.Conv2d or _hooked(module) or len(node.args) != 1 or node.kwargs:
            continue
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if plain and module.weight.dtype == torch.float32:
            yield node, module


def _hooked(module: nn.Module) -> bool:
    # A module does not say whether it has hooks, but the handle of an added hook refers to all of them.
    handles = [module.register_forward_hook(lambda *_: None), module.register_forward_pre_hook(lambda *_: None)]
    for handle in handles:
        handle.remove()
    return any(handle.hooks_dict_ref() for handle in handles)


def _replace_weights(net: fx.GraphModule, node: fx.Node, weight: Tensor, bias: Tensor | None) -> None:
    """Make ``node`` call a convolution or linear layer with other weights, and with the bias in the same dtype."""
    module = net.get_submodule(str(node.target))
    linear = isinstance(module, nn.Linear)
    sizes = (
        "in_features out_features" if linear else "in_channels out_channels kernel_size stride padding dilation groups"
    )
    settings: Any = {name: getattr(module, name) for name in sizes.split()}
    twin = (nn.Linear if linear else nn.Conv2d)(**settings, bias=bias is not None, device="meta")
    twin.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        twin.bias = nn.Parameter(bias.detach().to(weight.dtype), requires_grad=False)
    twin.eval()
    parent, _, attribute = str(node.target).rpartition(".")
    setattr(net.get_submodule(parent), attribute, twin)
