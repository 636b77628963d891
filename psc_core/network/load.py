"""Load a network by its *spec*, with the weights of a checkpoint; nothing is ever downloaded.

* ``torchvision:NAME``: a classification network of torchvision;
* ``timm:NAME``: a network of timm (``pip install 'psc[timm]'``);
* ``onnx:FILE``: an ONNX file, run by ONNX Runtime (``pip install 'psc[onnx]'``);
* ``package.module:factory``: a function ``factory(num_classes=…, **model_args) -> nn.Module``.  Importing it runs its
  code: whoever writes the spec permits that, while one that a bundle names must be on an allow-list
  (:func:`psc_core.network.backbone.rebuild_backbone`).

For torchvision's networks there are two more model arguments: ``in_channels`` replaces the first convolution, and
``stem="small"`` gives ResNets (3×3 stride-1 first convolution, no max-pooling) and VGGs (no last max-pooling, global
average pooling, one linear layer) the form for 28- and 32-pixel images.  All others go to the builder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.builders import BUILDERS, from_factory
from psc_core.network.onnx.network import open_onnx
from psc_core.network.weights import load_weights, read_weights

RECIPE: Final = "psc_recipe"
"""Attribute of a loaded network that holds its :class:`Recipe`, so that a bundle can rebuild it."""

NOTES: Final = "psc_weights_notes"
"""Attribute of a loaded network that says what was done to find its weights in their file."""

BUILT_BY_HAND: Final = "no name builds this network again; a bundle holds it as an ONNX graph"
"""The reason why a network has no recipe."""

MAX_WEIGHTS: Final = 1 << 31
"""Maximum number of weights of a network in a bundle (8 GiB of float32)."""

MAX_MODULES: Final = 1 << 15
"""Maximum number of modules of a network in a bundle."""


@dataclass(frozen=True)
class Recipe:
    """The instructions to build a network again, without its weights; ``model_args`` of the builder are JSON types.

    Raises:
        NetworkError: The spec has no family, or no name.
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
        """True if building imports code other than torchvision and timm."""
        return self.spec.partition(":")[0] not in BUILDERS


def load_network(
    spec: str,
    *,
    weights: str | Path | None = None,
    num_classes: int,
    model_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a classifier, in evaluation mode.

    Args:
        spec: ``torchvision:NAME``, ``timm:NAME``, ``onnx:FILE`` or ``package.module:factory``.
        weights: Checkpoint, ``.safetensors``, ``.pth``, ``.pt``, ``.bin``, ``.ckpt`` or ``.index.json``; nothing in it
            is run, and :func:`notes_of` says how the network was found in it.  ``None`` keeps the random
            initialisation, which draws from torch's global generator.
        num_classes: Number of logits.
        model_args: Arguments of the builder.

    Raises:
        NetworkError: Unknown spec, factory that cannot be imported, invalid arguments, or weights that do not fit.

    Example:
        >>> args = {"stem": "small", "in_channels": 1}
        >>> net = load_network("torchvision:resnet18", num_classes=10, model_args=args)
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    family, _, name = spec.partition(":")
    if family == "onnx":
        if weights is not None or model_args:
            raise NetworkError(f"{spec} holds its weights and its form; leave out weights and model arguments")
        return open_onnx(Path(name))
    recipe = Recipe(spec, num_classes, dict(model_args or {}))
    if recipe.is_factory:
        net = from_factory(spec, num_classes, recipe.model_args)
    else:
        net = BUILDERS[family](name, num_classes, recipe.model_args)
    if weights is not None:
        read = read_weights(Path(weights), net.state_dict())
        load_weights(net, read.tensors, num_classes=num_classes, origin=read.origin)
        setattr(net, NOTES, read.notes)
    setattr(net, RECIPE, recipe)
    return net.eval()


def recipe_of(net: nn.Module) -> Recipe | None:
    """The recipe of a network from :func:`load_network`; None for one built by hand."""
    return getattr(net, RECIPE, None)


def notes_of(net: nn.Module) -> tuple[str, ...]:
    """Return what was done to find the weights of a network from :func:`load_network` in their file, for people."""
    return getattr(net, NOTES, ())


@contextmanager
def bounded_size(recipe: Recipe) -> Iterator[None]:
    """A context that limits the size of networks built in it, for recipes from others.

    Networks of torchvision and timm are first built without memory (on torch's ``meta`` device), so that one of
    terabytes is rejected before any of it exists.  Then, and for factories, weights are counted as they are registered.

    Raises:
        NetworkError: More than :data:`MAX_WEIGHTS` weights or :data:`MAX_MODULES` modules.
    """
    if not recipe.is_factory:
        with _counting(), suppress(RuntimeError), torch.device("meta"):  # a builder that cannot run on it is skipped
            load_network(recipe.spec, num_classes=recipe.num_classes, model_args=recipe.model_args)
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
