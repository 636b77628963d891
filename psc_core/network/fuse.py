"""Copy a network, and rewrite a truncated one so that it runs fewer operations.

Three rewrites of the traced graph, applied only where they change nothing but rounding:

* each ``view`` becomes a ``reshape``, which gives the same values for channels-last maps, where ``view`` raises;
  :func:`reads_strides` finds the networks where that is not enough;
* batch normalisation after a convolution is folded into its weights (in float64, then rounded once);
* convolution weights are stored channels-last where that is faster, and for bfloat16 the weights of convolutions and
  linear layers are rounded once instead of by autocast in every step.

The original module does not change: it is the one that is fitted and that a bundle stores.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

from psc_core.errors import NetworkError
from psc_core.settings import Precision

_RESHAPES: Final = {"view": "reshape", "view_as": "reshape_as"}
# Operations that give a view of contiguous maps and a copy of channels-last ones.
_MAY_COPY: Final = frozenset({*_RESHAPES, *_RESHAPES.values(), "flatten", "Flatten", "ravel", "contiguous"})

_READ_STRIDES: Final = frozenset(
    {"as_strided", "as_strided_", "stride", "storage_offset", "is_contiguous", "resize_", "view_as_complex"}
)

# Packages whose functions do not depend on strides; those of others, wrapped for torch.fx, may use a ``view``.
_KNOWN: Final = frozenset({"torch", "torchvision", "timm", "operator", "_operator", "math", "builtins"})


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


def mutates(node: fx.Node, root: nn.Module) -> bool:
    """Return whether a node whose result is unused changes one of its arguments in place."""
    if node.op == "call_module":
        return bool(getattr(root.get_submodule(str(node.target)), "inplace", False))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    named = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    return named or bool(node.kwargs.get("inplace")) or node.kwargs.get("out") is not None


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
