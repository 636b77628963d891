"""The layers of a network in execution order.

A *layer* is a module; its value is the output of the module's last call.  The one exception is ``NAME:input``, the
input of the output layer NAME.  It is listed if no module's output equals it (a class token, functional pooling),
because it is the penultimate layer of the literature.

Granularity: ``operations`` lists every convolution, pooling and linear layer, as in the paper; a block with attention
is listed as a whole.  ``blocks`` lists residual, ConvNeXt, transformer and Swin blocks.  ``all`` lists every module.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from psc_core.errors import NetworkError, UsageError
from psc_core.network.layout import INPUT, canonical_shape, is_pooling, layout_of

GRANULARITIES: Final = ("operations", "blocks", "all")


@dataclass(frozen=True)
class LayerInfo:
    """One layer of a network.

    Attributes:
        name: Module name, dots between levels.
        index: Position in execution order among the layers of its granularity, from 0.
        kind: One of :data:`psc_core.network.layout.KINDS`.
        shape: Canonical (channels, spatial).
        grid: Shape of the spatial axis before flattening: (height, width), (tokens,) or (1,).
        role: ``"hidden"``; ``"penultimate"``, the input of the output layer; or ``"output"``, the logits.
    """

    name: str
    index: int
    kind: str
    shape: tuple[int, int]
    grid: tuple[int, ...]
    role: str = "hidden"


@dataclass
class _Run:
    """What one forward pass shows.

    Attributes:
        shapes: Output shapes by module name, in the order of the modules' last calls.
        vectors: Flattened outputs with as many entries as some linear layer has inputs.
        reads: Name and input of the last linear layer whose output has the shape of the logits.
        logits: Number of logits.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    vectors: dict[str, Tensor] = field(default_factory=dict)
    reads: tuple[str, Tensor] | None = None
    logits: int = 0


def list_layers(
    net: nn.Module,
    example: Float[Tensor, "1 channels height width"],
    *,
    granularity: str = "operations",
) -> list[LayerInfo]:
    """The layers of ``net`` in execution order, found by a forward pass of ``example``.

    A module that is called several times is listed once, at its last call.

    Args:
        net: A classifier in evaluation mode.
        example: One input.
        granularity: ``"operations"``, ``"blocks"`` or ``"all"``.

    Raises:
        UsageError: Unknown granularity.
        NetworkError: The network cannot run the example, returns no logits, or has no layers of this granularity.
    """
    if granularity not in GRANULARITIES:
        raise UsageError(f"expected a granularity of {', '.join(GRANULARITIES)}, got {granularity!r}")
    run = _run(net, example)
    chosen = _CHOICES[granularity](net)
    layers = []
    for name, shape in run.shapes.items():
        kind = layout_of(net, name).kind(shape) if name in chosen else None
        if kind is not None:
            layers.append(LayerInfo(name, 0, kind, *canonical_shape(shape, kind)))
    if not layers:
        raise NetworkError(f"{type(net).__name__} has no layers of granularity {granularity!r}; use another one")
    return [replace(layer, index=i) for i, layer in enumerate(_with_roles(net, layers, run))]


def select_layers(layers: Sequence[LayerInfo], pattern: str | None) -> list[LayerInfo]:
    """The layers whose name matches the regular expression anywhere; all layers for ``None``.

    Raises:
        UsageError: Not a regular expression, or no layer matches.
    """
    try:
        matcher = re.compile(pattern or "")
    except re.error as error:
        raise UsageError(f"expected a regular expression of layer names, got {pattern!r}: {error}") from error
    found = [layer for layer in layers if matcher.search(layer.name)]
    if not found:
        names = ", ".join(layer.name for layer in layers[:8])
        raise UsageError(f"no layer name matches {pattern!r}; the layers are {names}{', …' * (len(layers) > 8)}")
    return found


@torch.inference_mode()
def _run(net: nn.Module, example: Tensor) -> _Run:
    """Run the network on two copies of the example, which shows the outputs without a batch axis."""
    run = _Run()
    read_sizes = {module.in_features for module in net.modules() if isinstance(module, nn.Linear)}
    inputs: dict[str, Tensor] = {}

    def remember(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        run.shapes.pop(name, None)
        if isinstance(output, Tensor) and output.is_floating_point() and output.shape[:1] == (2,):
            run.shapes[name] = tuple(output.shape)
            if output[0].numel() in read_sizes:
                run.vectors[name] = output.flatten(1).clone()
            if isinstance(module, nn.Linear) and output.ndim == 2:
                inputs[name] = args[0].clone()

    handles = [module.register_forward_hook(partial(remember, name)) for name, module in net.named_modules() if name]
    try:
        logits = net.eval()(torch.cat([example, example]))
    except Exception as error:
        raise NetworkError(
            f"{type(net).__name__} cannot run an input of shape {tuple(example.shape)}: {type(error).__name__}: "
            f"{error}; check the preset, the image size and the model arguments"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise NetworkError(f"expected a classifier that returns logits (batch, classes), got {got}")
    run.logits = logits.shape[1]
    readers = [name for name in run.shapes if name in inputs and run.shapes[name] == tuple(logits.shape)]
    if readers:
        run.reads = (readers[-1], inputs[readers[-1]])
    return run


def _with_roles(net: nn.Module, layers: list[LayerInfo], run: _Run) -> list[LayerInfo]:
    """Mark the output layer (the last with weights, as wide as the logits) and the layer before it."""
    weighted = [i for i, layer in enumerate(layers) if isinstance(net.get_submodule(layer.name), _WEIGHTED)]
    ends = bool(weighted) and layers[weighted[-1]].shape[0] == run.logits
    output = weighted[-1] if ends else len(layers)
    hidden, outputs = layers[:output], [replace(layer, role="output") for layer in layers[output:]]
    if run.reads is not None:
        name, features = run.reads
        last = run.vectors.get(hidden[-1].name) if hidden else None
        if last is None or not torch.equal(last, features):
            hidden.append(LayerInfo(name + INPUT, 0, "vector", (features.shape[1], 1), (1,)))
    return [*hidden[:-1], *(replace(layer, role="penultimate") for layer in hidden[-1:]), *outputs]


_WEIGHTED = (_ConvNd, nn.Linear)


def _operations(net: nn.Module) -> set[str]:
    operations = {name for name, m in net.named_modules() if isinstance(m, _WEIGHTED) or is_pooling(m)}
    attending = [name for name in _blocks(net) if _attends(net.get_submodule(name))]
    inside = {name for name in operations if any(name.startswith(f"{block}.") for block in attending)}
    return (operations - inside) | set(attending)


def _attends(module: nn.Module) -> bool:
    return any("attention" in type(inner).__name__.lower() for inner in module.modules())


def _blocks(net: nn.Module) -> set[str]:
    """The innermost members of containers whose members are mostly composite modules.

    A stage is a container of blocks, and a list of stages is a container too, hence the innermost.
    """
    members = set(_block_members(net))
    outer = {name for name in members if any(other.startswith(f"{name}.") for other in members)}
    return members - outer


def _block_members(net: nn.Module) -> Iterator[str]:
    for name, container in net.named_modules():
        if not isinstance(container, nn.Sequential | nn.ModuleList):
            continue
        children = dict(container.named_children())
        composite = [key for key, child in children.items() if _is_composite(child)]
        if 2 * len(composite) > len(children):
            yield from (f"{name}.{key}" if name else key for key in composite)


def _is_composite(module: nn.Module) -> bool:
    listed = isinstance(module, nn.Sequential | nn.ModuleList)
    return not listed and next(module.children(), None) is not None


def _all(net: nn.Module) -> set[str]:
    return {name for name, _ in net.named_modules() if name}


_CHOICES: Mapping[str, Callable[[nn.Module], set[str]]] = {
    "operations": _operations,
    "blocks": _blocks,
    "all": _all,
}
