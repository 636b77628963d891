"""The layers of a network in execution order, and their outputs in one canonical shape, (batch, channels, spatial).

The spatial axis is row-major: the positions of a map, the tokens of a transformer, one entry for a vector.

=============  =====================  ==========================================================
form           module output          canonical
=============  =====================  ==========================================================
``map``        (B, C, H, W)           (B, C, H·W); (B, C, P) of one-dimensional layers as it is
``map_last``   (B, H, W, C)           (B, C, H·W), Swin and the linear layers of ConvNeXt
``tokens``     (B, T, C)              (B, C, T)
``vector``     (B, C)                 (B, C, 1)
=============  =====================  ==========================================================

Tokens before images, (T, B, C), as with torch's ``batch_first=False``, are read with the images first.

A *layer* is a module; its value is the output of the module's last call, or the first of several outputs.  The only
exception is ``NAME:input``, the input of the output layer NAME.  It is listed if no module's output equals it (a class
token, functional pooling), because it is the penultimate layer of the literature.

The *trunk* is the hidden layer before the penultimate layer, if everything that reaches the penultimate layer passes
through it: the last convolution of an EfficientNet or a VGG, the last block of a transformer, but no convolution beside
a shortcut.

Granularity: ``operations`` lists every convolution, pooling and linear layer, as in the paper; a block with attention
is listed as a whole.  ``blocks`` lists residual, ConvNeXt, transformer and Swin blocks.  ``all`` lists every module.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Literal, NamedTuple, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from psc_core.errors import NetworkError, UsageError
from psc_core.settings import Granularity

Form = Literal["map", "map_last", "tokens", "vector"]
CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
BATCH_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INPUT_SUFFIX: Final = ":input"  # suffix after a module's name that means the module's input instead of its output


def value_of(output: Any) -> Any:
    """Return a layer's value: the output of its module, or the first of several outputs, as of attention blocks."""
    return output[0] if isinstance(output, tuple) and output else output


def batch_axis(alone: Sequence[int] | None, together: Sequence[int], images: int) -> int | None:
    """Return the axis of the images, from the shapes of a value of one and of several; None if it is not certain."""
    if alone is None or len(alone) != len(together):
        return None
    differ = [axis for axis, (one, several) in enumerate(zip(alone, together, strict=True)) if one != several]
    return differ[0] if [(alone[axis], together[axis]) for axis in differ] == [(1, images)] else None


def has_tokens_first(alone: Sequence[int] | None, together: Sequence[int], images: int) -> bool:
    """Return whether a value is (T, B, C), from its shapes for one image and for several."""
    return len(together) == 3 and batch_axis(alone, together, images) == 1


def canonical(features: Float[Tensor, "batch ..."], form: Form) -> Float[Tensor, "batch channels spatial"]:
    if form == "map":
        return features.flatten(2)
    return features.unsqueeze(2) if form == "vector" else features.flatten(1, -2).transpose(1, 2)


@dataclass(frozen=True)
class Layout:
    """The evidence in a module's weights for the channel axis of its output, if that has three or four dimensions."""

    convolves: bool  # contains a convolution or batch normalisation (channels first)
    widths: frozenset[int]  # output widths of its linear layers and layer normalisations (channels last)
    channels: frozenset[int]  # output channels of its convolutions
    one_dimensional: bool = False  # convolves, normalises or pools along a single axis

    def form(self, shape: Sequence[int | torch.SymInt]) -> Form | None:
        """Return the form of an output of this shape, or ``None`` if it is not a batch of features.

        Convolutions keep channels first, linear layers last, unless only the other axis matches a width.  Three
        dimensions are tokens, except after one-dimensional layers; a single channel there (a sum of tokens, a check) is
        a token.
        """
        if len(shape) not in (3, 4):
            return "vector" if len(shape) == 2 else None
        fits_first, fits_last = shape[1] in self.widths | self.channels, shape[-1] in self.widths
        if len(shape) == 3:
            first = not self.widths or (fits_first and not fits_last)
            return "map" if self.one_dimensional and first and shape[1] > 1 else "tokens"
        if not self.widths:
            return "map"
        if not self.convolves:
            return "map" if fits_first and not fits_last else "map_last"
        return "map_last" if fits_last and not fits_first and shape[2] != shape[3] else "map"


def layout_of(net: nn.Module, name: str) -> Layout:
    """Return the layout of layer ``name``; a module without weights has the layout of its parent module."""
    module = net.get_submodule(name.removesuffix(INPUT_SUFFIX))
    if name.endswith(INPUT_SUFFIX):
        return Layout(False, frozenset({int(getattr(module, "in_features", 0))}), frozenset())
    if is_pooling(module):
        return Layout(True, frozenset(), frozenset(), "Pool1d" in type(module).__name__)
    if name and next(module.parameters(), None) is None:
        return layout_of(net, name.rpartition(".")[0])
    inside = list(module.modules())
    convolutions = [m for m in inside if isinstance(m, CONVOLUTIONS)]
    linears = [m for m in inside if isinstance(m, nn.Linear)]
    return Layout(
        bool(convolutions) or any(isinstance(m, BATCH_NORMS) for m in inside),
        frozenset(m.out_features for m in linears) | {width for m in inside if (width := _normalised_width(m))},
        frozenset(m.out_channels for m in convolutions),
        any(isinstance(m, nn.Conv1d | nn.ConvTranspose1d | nn.BatchNorm1d) for m in inside),
    )


def _normalised_width(module: nn.Module) -> int | None:
    """Return the width of the last axis if the module normalises it (layer and RMS normalisation), else ``None``.

    A module that normalises the channels of a map permutes it first, so it keeps the shape of a map with one position,
    on which all other normalisations fail.
    """
    shape = getattr(module, "normalized_shape", ())
    if not isinstance(shape, Sequence) or len(shape) != 1:
        return None
    width = int(shape[0])
    if type(module) is nn.LayerNorm:
        return width
    probe = next(module.parameters(), torch.empty(0)).new_zeros(1, width, 1, 1)
    try:
        with torch.no_grad():
            return None if module.forward(probe).shape == probe.shape else width
    except Exception:
        return width


def is_pooling(module: nn.Module) -> bool:
    return "Pool" in type(module).__name__ and next(module.children(), None) is None


_WEIGHTED: Final = (*CONVOLUTIONS, nn.Linear)


@dataclass(frozen=True)
class LayerInfo:
    name: str  # of the module, with dots between levels
    index: int  # position in execution order among the layers of its granularity, from 0
    form: Form  # of the output
    shape: tuple[int, int]  # canonical (channels, spatial)
    grid: tuple[int, ...]  # the spatial axis before flattening: (height, width), (tokens,) or (1,)
    role: str  # "hidden"; "trunk", see the module docstring; "penultimate", the input of "output"; "output", the logits


class LayeredNetwork(nn.Module):
    """A network that lists its own layers, because they are not modules."""

    def list_layers(self, trial: Tensor, granularity: str) -> list[LayerInfo]:
        """List the layers; see :func:`list_layers`."""
        raise NotImplementedError


class _Run(NamedTuple):
    shapes: dict[str, tuple[int, ...]]  # output shapes by module, images first, in the order of the modules' last calls
    vectors: dict[str, Tensor]  # flattened outputs of one position, or as many entries as some linear layer has inputs
    reads: tuple[str, Tensor] | None  # name and input of the last linear layer whose output is shaped as the logits
    logits: int


def list_layers(
    net: nn.Module, trial: Float[Tensor, "1 channels height width"], *, granularity: str = "operations"
) -> list[LayerInfo]:
    """Return the layers of ``net`` up to the logits, each at its last call, found by a forward pass of ``trial``."""
    if granularity not in get_args(Granularity):
        raise UsageError(f"expected a granularity of {', '.join(get_args(Granularity))}, got {granularity!r}")
    if isinstance(net, LayeredNetwork):
        return net.list_layers(trial, granularity)
    run = _run(net, trial)
    chosen = _names(net, granularity)
    layers = []
    for name, shape in run.shapes.items():
        form = layout_of(net, name).form(shape) if name in chosen else None
        if form is not None:
            channels, grid = (shape[1], shape[2:]) if form == "map" else (shape[-1], shape[1:-1] or (1,))
            layers.append(LayerInfo(name, 0, form, (channels, math.prod(grid)), grid, "hidden"))
    if not layers:
        raise NetworkError(f"{type(net).__name__} has no layers of granularity {granularity!r}; use another one")
    layers = _with_roles(net, layers, run)
    at = next((i for i, layer in enumerate(layers) if layer.role == "penultimate"), 0) - 1
    if at >= 0 and _carries_all(net, layers[at].name, trial):
        layers[at] = replace(layers[at], role="trunk")
    return [replace(layer, index=i) for i, layer in enumerate(layers)]


def select_layers(layers: Sequence[LayerInfo], pattern: str | None) -> list[LayerInfo]:
    """Return the layers whose name matches the regular expression anywhere; all layers for ``None``."""
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
def _run(net: nn.Module, trial: Tensor) -> _Run:
    """Run the network on the trial input and on two copies of it, which reveals the axis of the images in an output."""
    read_sizes = {module.in_features for module in net.modules() if isinstance(module, nn.Linear)}
    alone: dict[str, torch.Size] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    vectors: dict[str, Tensor] = {}
    inputs: dict[str, Tensor] = {}

    def measure(name: str, _module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        if isinstance(value := value_of(output), Tensor):
            alone[name] = value.shape

    def remember(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        shapes.pop(name, None)
        vectors.pop(name, None)
        output = value_of(output)
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return
        if has_tokens_first(alone.get(name), output.shape, 2):
            output = output.transpose(0, 1)
        elif batch_axis(alone.get(name), output.shape, 2) != 0:
            return
        shapes[name] = tuple(output.shape)
        if output[0].numel() in {*read_sizes, *output.shape[1:2]}:
            vectors[name] = output.flatten(1).clone()
        if isinstance(module, nn.Linear) and output.ndim == 2:
            inputs[name] = args[0].clone()

    net.eval()
    try:
        for see, images in ((measure, trial.clone()), (remember, torch.cat([trial, trial]))):
            with ExitStack() as hooks:
                for name, module in net.named_modules():
                    if name:
                        hooks.enter_context(module.register_forward_hook(partial(see, name)))
                logits = net(images)
    except Exception as error:
        raise NetworkError(
            f"{type(net).__name__} cannot run an input of shape {tuple(trial.shape)}: {type(error).__name__}: "
            f"{error}; check the preset, the image size and the model arguments"
        ) from error
    if not isinstance(logits, Tensor) or logits.ndim != 2 or logits.shape[0] != 2:
        got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        raise NetworkError(f"expected a classifier that returns logits (batch, classes), got {got}")
    names, made = [*shapes], [name for name in shapes if name in vectors and torch.equal(vectors[name], logits)]
    late = names[names.index(made[0]) :] if made else []  # such as another head
    shapes = {name: shape for name, shape in shapes.items() if name not in late or name in made}
    readers = [name for name, shape in shapes.items() if name in inputs and shape == tuple(logits.shape)]
    return _Run(shapes, vectors, (readers[-1], inputs[readers[-1]]) if readers else None, logits.shape[1])


def _with_roles(net: nn.Module, layers: list[LayerInfo], run: _Run) -> list[LayerInfo]:
    """Mark the output layer (the last layer with weights, if as wide as the logits) and the layer before it."""
    weighted = [i for i, layer in enumerate(layers) if isinstance(net.get_submodule(layer.name), _WEIGHTED)]
    ends = bool(weighted) and layers[weighted[-1]].shape[0] == run.logits
    output = weighted[-1] if ends else len(layers)
    hidden, outputs = layers[:output], [replace(layer, role="output") for layer in layers[output:]]
    if run.reads is not None:
        name, features = run.reads
        last = run.vectors.get(hidden[-1].name) if hidden else None
        if last is None or not torch.equal(last, features):
            hidden.append(LayerInfo(name + INPUT_SUFFIX, 0, "vector", (features.shape[1], 1), (1,), "hidden"))
    return [*hidden[:-1], *(replace(layer, role="penultimate") for layer in hidden[-1:]), *outputs]


@torch.inference_mode()
def _carries_all(net: nn.Module, name: str, trial: Tensor) -> bool:
    """Return whether the logits are the same for another image if the output of the module ``name`` is held fixed."""
    calls: list[Tensor | None] = []

    def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        calls.append(output.clone() if isinstance(output, Tensor) else None)

    def hold(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        # Only the last call: the earlier ones of an activation that a network shares are of other layers.
        held = calls.pop(0) if calls else None
        return output if calls or held is None else held

    module = net.get_submodule(name)
    with module.register_forward_hook(keep):
        first = net(trial)
    with module.register_forward_hook(hold):
        second = net(torch.flip(trial, (2, 3)) + 1)
    return not calls and torch.equal(first, second)


def _names(net: nn.Module, granularity: str) -> set[str]:
    modules = {name: module for name, module in net.named_modules() if name}
    if granularity == "all":
        return set(modules)
    blocks = _blocks(net)
    if granularity == "blocks":
        return blocks
    attending = {n for n in blocks if any("attention" in type(m).__name__.lower() for m in modules[n].modules())}
    operations = {name for name, module in modules.items() if isinstance(module, _WEIGHTED) or is_pooling(module)}
    return attending | {name for name in operations if not any(name.startswith(f"{block}.") for block in attending)}


def _blocks(net: nn.Module) -> set[str]:
    """Return the innermost members (no stages) of containers whose members are mostly modules of several operations."""
    members = set()
    containers = (nn.Sequential, nn.ModuleList)
    for name, container in net.named_modules():
        if isinstance(container, containers):
            children = dict(container.named_children())
            several = [key for key, m in children.items() if not isinstance(m, containers) and _operations(m) > 1]
            if 2 * len(several) > len(children):
                members |= {f"{name}.{key}" if name else key for key in several}
    return {name for name in members if not any(other.startswith(f"{name}.") for other in members)}


def _operations(net: nn.Module) -> int:
    return sum(isinstance(module, _WEIGHTED) for module in net.modules())
