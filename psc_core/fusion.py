"""The same network with fewer operations: what a truncated network is turned into before it runs.

Three rewrites of a traced graph, each only where it provably changes nothing but rounding:

* batch normalisation behind a convolution is folded into its weights (in float64, then rounded once);
* for bfloat16, the weights of convolutions and linear layers are rounded once, not by autocast in every step;
* on a CPU with oneDNN, convolutions keep their weights in the order that its kernels read, and take a residual
  sum and a ReLU behind them along; activations are channels-last.

The original module is left as it is: it is what a bundle stores, and what is fitted.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, Final, cast

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_conv_bn_weights

from psc_core.tracing import mutates, share

_RELU_FUNCTIONS: Final = (F.relu, torch.relu, torch.relu_)
_RELU_METHODS: Final = ("relu", "relu_")
_ADD_FUNCTIONS: Final = (operator.add, operator.iadd, torch.add)
_ADD_METHODS: Final = ("add", "add_")
_IN_PLACE: Final = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.setitem)


def fuse(body: nn.Module, *, precision: str) -> nn.Module:
    """A copy of ``body`` for the device that its weights are on, in fewer and faster operations.

    Args:
        body: A traced network (``fx.GraphModule``) in evaluation mode; any other module is returned as it is.
        precision: ``"fp32"``, or ``"bf16"`` when it will run under bfloat16 autocast.
    """
    if not isinstance(body, fx.GraphModule):
        return body
    twin = cast(fx.GraphModule, share(body))
    on_cpu = all(parameter.device.type == "cpu" for parameter in twin.parameters())
    with torch.inference_mode(False), torch.no_grad():
        _fold_batch_norm(twin)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        if on_cpu and can_pack(dtype):
            _pack_convolutions(twin, dtype)
        _copy_weights(twin, dtype, images_format(body, precision))
    twin.graph.lint()
    twin.recompile()
    return twin


def images_format(body: nn.Module, precision: str) -> torch.memory_format:
    """How images should lie in memory for what :func:`fuse` makes of ``body``.

    Channels-last is what oneDNN's kernels and CUDA's tensor cores read; float32 on CUDA does not use those.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in body.parameters())
    traced = isinstance(body, fx.GraphModule)
    return torch.channels_last if traced and (on_cpu or precision == "bf16") else torch.contiguous_format


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this process can run :class:`PackedConvolution`: oneDNN on an x86 CPU that has the type."""
    known = hasattr(torch.ops.mkldnn, "_convolution_pointwise") and hasattr(
        torch._C._nn, "mkldnn_reorder_conv2d_weight"
    )
    if not (known and torch._C._has_mkldnn and torch.backends.cpu.get_cpu_capability().startswith("AVX")):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


class PackedConvolution(nn.Module):
    """A convolution by oneDNN with packed weights: ``act(conv(x) + other)``.

    The weights are an opaque tensor of oneDNN's: not in the state dict, and bound to the CPU.  Those of a float32
    1×1 convolution stay as they are: the order that its kernel reads depends on the size of the batch, and one in the
    wrong order costs more than the product.

    Args:
        convolution: Zero padding given in numbers, on the CPU.
        dtype: Of weights, inputs (others are converted) and output.
    """

    def __init__(self, convolution: nn.Conv2d, dtype: torch.dtype) -> None:
        super().__init__()
        padding = cast("tuple[int, ...]", convolution.padding)
        self.geometry = (list(padding), list(convolution.stride), list(convolution.dilation), convolution.groups)
        self.kernel, self.channels = convolution.kernel_size, convolution.out_channels
        self.dtype = dtype
        self.activation = "none"
        weight = convolution.weight.detach().to(dtype).contiguous(memory_format=torch.channels_last)
        if dtype == torch.bfloat16 or self.kernel != (1, 1):
            reorder: Callable[..., Tensor] = torch._C._nn.mkldnn_reorder_conv2d_weight
            weight = reorder(weight.to_mkldnn(), *self.geometry, None)
        self.weight = weight
        self.bias = None if convolution.bias is None else convolution.bias.detach().to(dtype)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        """``x`` (B, C, H, W); an ``other`` of another shape than the output is broadcast; channels-last out."""
        x = x.to(self.dtype)
        operations: Any = torch.ops.mkldnn._convolution_pointwise
        activation = self.activation
        if other is not None and tuple(other.shape) == self.output_shape(x):
            unary = None if activation == "none" else activation
            other = other.to(self.dtype)
            sum_: Tensor = operations.binary(
                x, other, self.weight, self.bias, *self.geometry, "add", 1.0, unary, [], None
            )
            return sum_
        alone = "none" if other is not None else activation
        result: Tensor = operations.default(x, self.weight, self.bias, *self.geometry, alone, [], "")
        if other is None:
            return result
        return F.relu(result + other) if activation == "relu" else result + other

    def output_shape(self, x: Tensor) -> tuple[int, ...]:
        """Shape of ``conv(x)``."""
        padding, stride, dilation, _ = self.geometry
        sides = zip(x.shape[2:], self.kernel, padding, stride, dilation, strict=True)
        return (len(x), self.channels, *((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, p, s, d in sides))


# -- rewrites -------------------------------------------------------------------------------------------------


def _fold_batch_norm(net: fx.GraphModule) -> None:
    for node, convolution in list(_convolutions(net)):
        norm_node = _only_user(node)
        if norm_node is None or norm_node.op != "call_module" or len(norm_node.args) != 1 or norm_node.kwargs:
            continue
        norm = net.get_submodule(str(norm_node.target))
        if type(norm) is not nn.BatchNorm2d or norm.running_mean is None or norm.running_var is None or _hooked(norm):
            continue
        parts = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
        wide = [part.detach().double() if isinstance(part, Tensor) else part for part in parts]
        bias = None if convolution.bias is None else convolution.bias.detach().double()
        weight, shift = fuse_conv_bn_weights(convolution.weight.detach().double(), bias, *wide)  # type: ignore[arg-type]
        _set(net, node, _convolution_like(convolution, weight.float(), shift.float()))
        norm_node.replace_all_uses_with(node)
        net.graph.erase_node(norm_node)


def _copy_weights(net: fx.GraphModule, dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    """Weights of the type and in the order that will run; the originals, which are shared, stay as they are."""
    for node, convolution in list(_convolutions(net)):
        weight = convolution.weight.detach().to(dtype).contiguous(memory_format=memory_format)
        bias = None if convolution.bias is None else convolution.bias.detach().to(dtype)
        _set(net, node, _convolution_like(convolution, weight, bias))
    for node in _called_once(net):
        module = net.get_submodule(str(node.target))
        if type(module) is nn.Linear and not _hooked(module) and module.weight.dtype == torch.float32 != dtype:
            rounded = nn.Linear(module.in_features, module.out_features, module.bias is not None, "meta")
            rounded.weight = nn.Parameter(module.weight.detach().to(dtype), requires_grad=False)
            if module.bias is not None:
                rounded.bias = nn.Parameter(module.bias.detach().to(dtype), requires_grad=False)
            _set(net, node, rounded.eval())


def _pack_convolutions(net: fx.GraphModule, dtype: torch.dtype) -> None:
    for node, convolution in list(_convolutions(net)):
        packed = PackedConvolution(convolution, dtype)
        _set(net, node, packed)
        node = _take_sum(net, node)
        activation = _only_user(node)
        if activation is not None and _is_relu(net, activation):
            packed.activation = "relu"
            activation.replace_all_uses_with(node)
            net.graph.erase_node(activation)


def _take_sum(net: fx.GraphModule, node: fx.Node) -> fx.Node:
    """Let the packed convolution at ``node`` add the other summand of its only user, if that is a plain sum.

    The convolution moves to where the sum was, so nothing in between may change its input in place.  A sum in place
    may change the convolution's own output, which nobody else reads, and no other tensor.
    """
    sum_ = _only_user(node)
    if sum_ is None or sum_.kwargs or len(sum_.args) != 2 or not _calls(sum_, _ADD_FUNCTIONS, _ADD_METHODS):
        return node
    others = [arg for arg in sum_.args if isinstance(arg, fx.Node) and arg is not node]
    if sum_.args[0] is not node and _may_mutate(net, sum_):
        return node
    between = node.next
    while between is not sum_ and not _may_mutate(net, between):
        between = between.next
    if len(others) != 1 or between is not sum_:
        return node
    with net.graph.inserting_before(sum_):
        moved = net.graph.call_module(str(node.target), (*node.args, others[0]))
    sum_.replace_all_uses_with(moved)
    net.graph.erase_node(sum_)
    net.graph.erase_node(node)
    return moved


# -- questions about a graph ----------------------------------------------------------------------------------


def _called_once(net: fx.GraphModule) -> list[fx.Node]:
    """Calls of modules that are called nowhere else, by that or another name."""
    nodes = [node for node in net.graph.nodes if node.op == "call_module"]
    modules = [id(net.get_submodule(str(node.target))) for node in nodes]
    return [node for node, module in zip(nodes, modules, strict=True) if modules.count(module) == 1]


def _convolutions(net: fx.GraphModule) -> Iterator[tuple[fx.Node, nn.Conv2d]]:
    """Plain 2-D convolutions with float32 weights and numeric zero padding, and where they are called.

    None with hooks: old-style spectral and weight normalisation and pruning are hooks that make the weight anew in
    every call, and until the first one it holds anything.
    """
    for node in _called_once(net):
        module = net.get_submodule(str(node.target))
        if type(module) is not nn.Conv2d or _hooked(module) or len(node.args) != 1 or node.kwargs:
            continue
        plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        if plain and module.weight.dtype == torch.float32:
            yield node, module


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _calls(node: fx.Node, functions: tuple[Any, ...], methods: tuple[str, ...]) -> bool:
    return (node.op == "call_function" and node.target in functions) or (
        node.op == "call_method" and node.target in methods
    )


def _is_relu(net: fx.GraphModule, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = net.get_submodule(str(node.target))
        return type(module) is nn.ReLU and not _hooked(module)
    return _calls(node, _RELU_FUNCTIONS, _RELU_METHODS)


def _may_mutate(net: fx.GraphModule, node: fx.Node) -> bool:
    return mutates(node, net) or (node.op == "call_function" and node.target in _IN_PLACE)


# -- edits ----------------------------------------------------------------------------------------------------


def _set(net: fx.GraphModule, node: fx.Node, module: nn.Module) -> None:
    parent, _, attribute = str(node.target).rpartition(".")
    setattr(net.get_submodule(parent), attribute, module)


def _convolution_like(convolution: nn.Conv2d, weight: Tensor, bias: Tensor | None) -> nn.Conv2d:
    """The same convolution with other weights."""
    twin = nn.Conv2d(
        convolution.in_channels,
        convolution.out_channels,
        convolution.kernel_size,  # type: ignore[arg-type]
        convolution.stride,  # type: ignore[arg-type]
        convolution.padding,  # type: ignore[arg-type]
        convolution.dilation,  # type: ignore[arg-type]
        convolution.groups,
        bias is not None,
        device="meta",
    )
    twin.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        twin.bias = nn.Parameter(bias, requires_grad=False)
    return twin.eval()
