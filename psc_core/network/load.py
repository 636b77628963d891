"""A network from its *spec*, with weights from a safetensors file and nothing ever downloaded.

* ``torchvision:NAME``: a classification network of torchvision;
* ``timm:NAME``: one of timm (``pip install 'psc[timm]'``);
* ``package.module:factory``: a function ``factory(num_classes=…, **model_args) -> nn.Module``, imported only
  where the caller's allow-list names it, because importing runs its code.

Two model arguments are ours for torchvision's networks: ``in_channels`` replaces the first convolution,
and ``stem="small"`` gives ResNets (3×3 stride-1 first convolution, no max-pool) and VGGs (no last max-pool,
global average pool, one linear layer) the form used for 28- and 32-pixel images.  Others go to the builder.

A loaded network remembers its :class:`Recipe`, so that a bundle can rebuild it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.builders import BUILDERS, from_factory
from psc_core.network.weights import load_weights, read_tensors

_RECIPE = "psc_recipe"
"""Attribute of a loaded network that holds its :class:`Recipe`."""


MAX_WEIGHTS: Final = 1 << 31
"""Most weights of a network that a bundle may name (8 GiB of float32)."""


MAX_MODULES: Final = 1 << 15
"""Most modules of a network that a bundle may name."""


@dataclass(frozen=True)
class Recipe:
    """What it takes to build a network again, weights apart.

    Attributes:
        spec: ``torchvision:NAME``, ``timm:NAME`` or ``package.module:factory``.
        num_classes: Number of logits.
        model_args: Arguments of the builder, JSON types.
    """

    spec: str
    num_classes: int
    model_args: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_factory(self) -> bool:
        """Whether building imports code other than torchvision's or timm's."""
        return self.spec.partition(":")[0] not in BUILDERS

    def to_json(self) -> dict[str, Any]:
        """The attributes as JSON types."""
        return {"spec": self.spec, "num_classes": self.num_classes, "model_args": dict(self.model_args)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Recipe:
        """Inverse of :meth:`to_json`."""
        return cls(str(data["spec"]), int(data["num_classes"]), dict(data["model_args"]))


def load_network(
    spec: str,
    *,
    weights: str | Path | None = None,
    num_classes: int,
    model_args: Mapping[str, Any] | None = None,
    allow_factories: Collection[str] = (),
) -> nn.Module:
    """Build a classifier, in evaluation mode.

    Args:
        spec: See the module docstring.
        weights: Safetensors file of its state dict; ``None`` leaves the random initialisation, which draws
            from torch's global generator.
        num_classes: Number of logits.
        model_args: Arguments of the builder.
        allow_factories: Factory specs that may be imported.

    Raises:
        NetworkError: Unknown spec, factory not allowed, arguments refused, or weights that do not fit.
    """
    recipe = Recipe(spec, num_classes, dict(model_args or {}))
    source, separator, name = spec.partition(":")
    if not separator or not source or not name:
        raise NetworkError(f"expected torchvision:NAME, timm:NAME or package.module:factory, got {spec!r}")
    if recipe.is_factory:
        net = from_factory(spec, num_classes, recipe.model_args, allow_factories)
    else:
        net = BUILDERS[source](name, num_classes, recipe.model_args)
    if weights is not None:
        load_weights(net, read_tensors(Path(weights)), num_classes=num_classes, origin=str(weights))
    setattr(net, _RECIPE, recipe)
    return net.eval()


def recipe_of(net: nn.Module) -> Recipe:
    """The recipe of a network from :func:`load_network`, or of what was cut from one.

    Raises:
        NetworkError: The network was built by hand, so nothing says how to build it again.
    """
    recipe = getattr(net, _RECIPE, None)
    if not isinstance(recipe, Recipe):
        raise NetworkError(
            "expected a network from load_network, got one built by hand, which a bundle cannot rebuild; put its "
            "construction into a function and load it with load_network('package.module:function', …)"
        )
    return recipe


def copy_recipe(source: nn.Module, target: nn.Module) -> None:
    """Let ``target`` remember the recipe of ``source``, if it has one."""
    setattr(target, _RECIPE, getattr(source, _RECIPE, None))


@contextmanager
def bounded_size(recipe: Recipe) -> Iterator[None]:
    """Limit what building may allocate inside, for recipes that somebody else wrote.

    Torchvision's and timm's networks are first built without memory (torch's ``meta`` device), so that one of
    terabytes is refused before any of it exists; then, and for factories, weights count as they are registered.

    Raises:
        NetworkError: More than :data:`MAX_WEIGHTS` weights or :data:`MAX_MODULES` modules.
    """
    with _counting():
        if not recipe.is_factory:
            _build_without_memory(recipe)
    with _counting():
        yield


def _build_without_memory(recipe: Recipe) -> None:
    """Raises :class:`NetworkError` as ``load_network`` does; a builder that cannot do without memory passes."""
    with suppress(RuntimeError), torch.device("meta"):
        load_network(recipe.spec, num_classes=recipe.num_classes, model_args=recipe.model_args)


@contextmanager
def _counting() -> Iterator[None]:
    weights = modules = 0

    def count(_module: nn.Module, _name: str, added: Tensor | nn.Module | None) -> None:
        nonlocal weights, modules
        modules += isinstance(added, nn.Module)
        weights += added.numel() if isinstance(added, Tensor) else 0
        if weights > MAX_WEIGHTS or modules > MAX_MODULES:
            raise NetworkError(
                f"expected a network of at most {MAX_WEIGHTS} weights and {MAX_MODULES} modules, the "
                "arguments ask for more; check num_classes and the model arguments"
            )

    register = torch.nn.modules.module
    handles = [
        register.register_module_parameter_registration_hook(count),
        register.register_module_buffer_registration_hook(count),
        register.register_module_module_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
