"""Load a network by its *spec*, with the weights of a checkpoint; nothing is ever downloaded.

* ``torchvision:NAME``: a classification network of torchvision;
* ``timm:NAME``: a network of timm (``pip install 'psc[timm]'``);
* ``onnx:FILE``: an ONNX file, run by ONNX Runtime (``pip install 'psc[onnx]'``);
* ``hf:DIR``, ``timm:local-dir:DIR``: a folder of transformers (``pip install 'psc[hf]'``) or of timm, with its weights;
  with ORG/NAME instead of DIR, the model in the Hugging Face cache (:mod:`psc_core.network.described.families`);
* ``package.module:factory``: a function ``factory(num_classes=…, **model_args) -> nn.Module``.  Importing it runs its
  code: whoever writes the spec permits that, but a factory that a bundle names must be on an allow-list
  (:func:`psc_core.network.backbone.rebuild_backbone`).

torchvision's networks accept two more model arguments: ``in_channels`` replaces the first convolution, and
``stem="small"`` adapts ResNets (3×3 stride-1 first convolution, no max-pooling) and VGGs (no last max-pooling, global
average pooling, one linear layer) to 28- and 32-pixel images.  All other arguments go to the builder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core.compute.device import own_state
from psc_core.errors import NetworkError
from psc_core.network.builders import BUILDERS, from_factory
from psc_core.network.described import hugging_face
from psc_core.network.described.base import Described
from psc_core.network.described.families import describe
from psc_core.network.onnx.network import OnnxNetwork, open_onnx
from psc_core.network.weights import load_weights, read_weights

ONNX: Final = "onnx:"
"""Prefix of the spec of a network in an ONNX file."""

RECIPE: Final = "psc_recipe"
"""Name of the attribute of a loaded network that holds its :class:`Recipe`, from which a bundle rebuilds it."""

NOTES: Final = "psc_weights_notes"
"""Name of the attribute of a loaded network that says how its weights were found in their file."""

BUILT_BY_HAND: Final = "no name builds this network again; a bundle holds it as an ONNX graph"
"""The reason why a network has no recipe, for messages."""

MAX_WEIGHTS: Final = 1 << 31
"""Maximum number of weights of a network in a bundle (8 GiB in float32)."""

MAX_MODULES: Final = 1 << 15
"""Maximum number of modules of a network in a bundle."""


@dataclass(frozen=True)
class Recipe:
    """The instructions to build a network without its weights; ``model_args`` of the builder are JSON types.

    Raises:
        NetworkError: If the spec has no family or no name.
    """

    spec: str
    num_classes: int
    model_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        source, _, name = self.spec.partition(":")
        if not source or not name:
            families = ", ".join(f"{family}:NAME" for family in BUILDERS)
            raise NetworkError(f"expected {families} or package.module:factory, got {self.spec!r}")

    @property
    def is_factory(self) -> bool:
        """True if building imports code other than torchvision's and timm's."""
        return self.spec.partition(":")[0] not in BUILDERS


@own_state()
def load_network(
    spec: str,
    *,
    weights: str | Path | None = None,
    num_classes: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a classifier, in evaluation mode.

    Args:
        spec: ``torchvision:NAME``, ``timm:NAME``, ``hf:DIR``, ``timm:local-dir:DIR``, ``onnx:FILE`` or
            ``package.module:factory``.
        weights: A checkpoint, ``.safetensors``, ``.pth``, ``.pt``, ``.bin``, ``.ckpt`` or ``.index.json``.  Nothing in
            it is run, and :func:`notes_of` says how the network was found in it.  ``None`` takes the weights in the
            folder, if there is one, and otherwise keeps the random initialisation, which uses torch's global generator.
        num_classes: Number of logits; None takes the number in the folder.
        model_args: Arguments of the builder, JSON types.

    Raises:
        NetworkError: If the spec is unknown, the factory cannot be imported, arguments are invalid, the folder lacks a
            file, or the weights do not fit.

    Example:
        >>> args = {"stem": "small", "in_channels": 1}
        >>> net = load_network("torchvision:resnet18", num_classes=10, model_args=args)
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    file = None if weights is None else Path(weights)
    if spec.startswith(ONNX):
        return _open_onnx(spec, file, model_args or {})
    described = describe(spec)
    return load_described(described, recipe_for(spec, described, num_classes, model_args or {}), file)


def recipe_for(spec: str, described: Described, num_classes: int | None, model_args: Mapping[str, Any]) -> Recipe:
    """Return the recipe of the network of a spec, from its description and what the caller adds to it.

    Raises:
        NetworkError: If neither says the number of classes, they say different ones, or it is below 1.
    """
    if num_classes is not None and num_classes < 1:
        raise NetworkError(f"expected num_classes of at least 1, got {num_classes}")
    outputs = num_classes or described.outputs
    if outputs is None:
        raise NetworkError(f"{spec} does not say its number of classes; give num_classes")
    if described.outputs not in (None, outputs):
        raise NetworkError(
            f"{spec} is for {described.outputs} classes, the data has {outputs}; use the data that the network was "
            "trained on"
        )
    return Recipe(described.spec or spec, outputs, {**described.model_args, **model_args})


@own_state()
def load_described(described: Described, recipe: Recipe, weights: Path | None) -> nn.Module:
    """Load the network of a recipe from :func:`recipe_for`, in evaluation mode.

    Args:
        described: The description that the network gives of itself.
        recipe: How it is built.
        weights: Checkpoint; None for the weights that lie beside the description.

    Raises:
        NetworkError: If :func:`load_network` would raise it.
    """
    if recipe.spec.startswith(ONNX):
        return _open_onnx(recipe.spec, weights, recipe.model_args)
    if described.folder is not None and not described.spec:
        if recipe.model_args:
            raise NetworkError(f"{recipe.spec} has its own arguments; leave out {', '.join(recipe.model_args)}")
        classifier = hugging_face.load(described.folder)
        if weights is not None:
            setattr(classifier, NOTES, _read_into(classifier.model, weights, recipe.num_classes))
        return classifier
    net = build(recipe)
    for file in described.weights if weights is None else (weights,):
        setattr(net, NOTES, _read_into(net, file, recipe.num_classes))
    return net


def _open_onnx(spec: str, weights: Path | None, model_args: Mapping[str, Any]) -> nn.Module:
    if weights is not None or model_args:
        raise NetworkError(f"{spec} holds its own weights and settings; leave out weights and model arguments")
    return open_onnx(Path(spec.removeprefix(ONNX)).expanduser())


def _read_into(net: nn.Module, file: Path, outputs: int) -> tuple[str, ...]:
    """Copy the weights in a file into ``net``, and return notes on how they were found."""
    read = read_weights(file, net.state_dict())
    load_weights(net, read.tensors, num_classes=outputs, origin=read.origin)
    return read.notes


def build(recipe: Recipe) -> nn.Module:
    """Build a network without its weights, and read no folder, because somebody else may have written the recipe.

    Raises:
        NetworkError: If the spec is unknown, the factory cannot be imported, or arguments are invalid.
    """
    if recipe.is_factory:
        net = from_factory(recipe.spec, recipe.num_classes, recipe.model_args)
    else:
        family, _, name = recipe.spec.partition(":")
        net = BUILDERS[family](name, recipe.num_classes, recipe.model_args)
    setattr(net, RECIPE, recipe)
    return net.eval()


def recipe_of(net: nn.Module) -> Recipe | None:
    """Return the recipe of a network from :func:`load_network`; None for a network built by hand."""
    return getattr(net, RECIPE, None)


def forget_recipe(net: nn.Module) -> None:
    """Remove the recipe of a network, so that a bundle stores it as an ONNX graph."""
    setattr(net, RECIPE, None)


def notes_of(net: nn.Module) -> tuple[str, ...]:
    """Return notes for the user on how :func:`load_network` found the network in its file."""
    return net.notes if isinstance(net, OnnxNetwork) else getattr(net, NOTES, ())


@contextmanager
def bounded_size(recipe: Recipe) -> Iterator[None]:
    """Limit the size of networks built in this context, for untrusted recipes.

    Networks of torchvision and timm are first built without memory (on torch's ``meta`` device), so that a network of
    terabytes is rejected before any of it exists.  Then, and for factories, weights are counted as they are registered.

    Raises:
        NetworkError: If there are more than :data:`MAX_WEIGHTS` weights or :data:`MAX_MODULES` modules.
    """
    if not recipe.is_factory:
        with _counting(), suppress(RuntimeError), torch.device("meta"):  # some builders cannot run on it
            build(recipe)
    with _counting():
        yield


@contextmanager
def _counting() -> Iterator[None]:
    weights = modules = 0

    def count(_module: nn.Module, _name: str, added: Tensor | nn.Module | None) -> None:
        nonlocal weights, modules
        modules += isinstance(added, nn.Module)
        weights += added.numel() if isinstance(added, Tensor) else 0
        if weights > MAX_WEIGHTS or modules > MAX_MODULES:
            raise NetworkError(
                f"network has more than {MAX_WEIGHTS} weights or {MAX_MODULES} modules; check num_classes and the "
                "model arguments"
            )

    all_modules = torch.nn.modules.module
    with (
        all_modules.register_module_parameter_registration_hook(count),
        all_modules.register_module_buffer_registration_hook(count),
        all_modules.register_module_module_registration_hook(count),
    ):
        yield
