"""Load a network by its *spec*, with weights from a safetensors file; nothing is ever downloaded.

* ``torchvision:NAME``: a classification network of torchvision;
* ``timm:NAME``: a network of timm (``pip install 'psc[timm]'``);
* ``hf:DIR``, ``timm:local-dir:DIR``: a folder of transformers (``pip install 'psc[hf]'``) or of timm, with its weights;
  ORG/NAME in the place of DIR is looked for in the Hugging Face cache (:mod:`psc_core.network.described.families`);
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
from itertools import product
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from psc_core.errors import NetworkError
from psc_core.network.builders import BUILDERS, from_factory
from psc_core.network.described import hugging_face
from psc_core.network.described.families import describe

RECIPE: Final = "psc_recipe"
"""Attribute of a loaded network that holds its :class:`Recipe`, so that a bundle can rebuild it."""

BUILT_BY_HAND: Final = (
    "a bundle cannot rebuild a network built by hand; build it in a function and load it with "
    "load_network('package.module:function', …)"
)
"""The reason why a network without a recipe cannot be saved, and what to do."""

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
    num_classes: int | None = None,
    model_args: Mapping[str, Any] | None = None,
) -> nn.Module:
    """Build a classifier, in evaluation mode.

    Args:
        spec: ``torchvision:NAME``, ``timm:NAME``, ``hf:DIR``, ``timm:local-dir:DIR`` or ``package.module:factory``.
        weights: Safetensors file of the state dict; ``None`` takes those of the folder, where there is one, else keeps
            the random initialisation, which draws from torch's global generator.
        num_classes: Number of logits; None for the folder's.
        model_args: Arguments of the builder.

    Raises:
        NetworkError: Unknown spec, factory that cannot be imported, invalid arguments, a folder that lacks something,
            or weights that do not fit.

    Example:
        >>> args = {"stem": "small", "in_channels": 1}
        >>> net = load_network("torchvision:resnet18", num_classes=10, model_args=args)
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    described = describe(spec)
    outputs = num_classes or described.outputs
    if outputs is None:
        raise NetworkError(f"{spec} does not say its number of classes; give num_classes")
    if described.outputs not in (None, outputs):
        raise NetworkError(
            f"{spec} is for {described.outputs} classes, the data has {outputs}; use the data that the network was "
            "trained on"
        )
    recipe = Recipe(described.spec or spec, outputs, {**described.model_args, **(model_args or {})})
    if described.folder is not None and not described.spec:
        if model_args:
            raise NetworkError(f"{spec} says its arguments itself; leave out {', '.join(model_args)}")
        classifier = hugging_face.load(described.folder)
        if weights is not None:
            load_weights(classifier.model, read_tensors(Path(weights)), num_classes=outputs, origin=str(weights))
        return classifier
    net = build(recipe)
    for file in described.weights if weights is None else (Path(weights),):
        load_weights(net, read_tensors(file), num_classes=outputs, origin=str(file))
    return net


def build(recipe: Recipe) -> nn.Module:
    """Build a network without its weights; no folder is read, so others may have written the recipe.

    Raises:
        NetworkError: Unknown spec, factory that cannot be imported, or invalid arguments.
    """
    if recipe.is_factory:
        net = from_factory(recipe.spec, recipe.num_classes, recipe.model_args)
    else:
        family, _, name = recipe.spec.partition(":")
        net = BUILDERS[family](name, recipe.num_classes, recipe.model_args)
    setattr(net, RECIPE, recipe)
    return net.eval()


def recipe_of(net: nn.Module) -> Recipe | None:
    """The recipe of a network from :func:`load_network`; None for one built by hand."""
    return getattr(net, RECIPE, None)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, on the CPU.

    Raises:
        NetworkError: No such file, or not a safetensors file.
    """
    if not path.is_file():
        raise NetworkError(f"there is no file of weights {path}; give a safetensors file")
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, ValueError) as error:
        raise NetworkError(
            f"{path} is not a safetensors file ({error}); convert a PyTorch checkpoint with "
            "safetensors.torch.save_file(net.state_dict(), FILE)"
        ) from error


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, num_classes: int, origin: str) -> None:
    """Copy ``state`` into ``net``.

    Batch counters (``num_batches_tracked``) may be missing, because evaluation does not read them.
    The number of classes of the data and the ``origin`` of the tensors are for messages.

    Raises:
        NetworkError: Missing, unexpected or non-finite tensors, or tensors of the wrong shape.
    """
    wanted = net.state_dict()
    missing = [key for key in wanted if key not in state and not key.endswith("num_batches_tracked")]
    unexpected = [key for key in state if key not in wanted]
    if missing or unexpected:
        raise NetworkError(
            f"{origin} does not fit the network: {_count('missing', missing)}, {_count('unexpected', unexpected)}; "
            "check the model name and its arguments" + _prefix_hint(missing, unexpected)
        )
    for key, tensor in state.items():
        expected, got = tuple(wanted[key].shape), tuple(tensor.shape)
        if expected != got:
            if got and expected == (num_classes, *got[1:]):
                raise NetworkError(
                    f"{origin} is for {got[0]} classes ({key} is {got}), the data has {num_classes}; use the data that "
                    "the network was trained on"
                )
            raise NetworkError(f"{origin}: expected {key} of shape {expected}, got {got}; check the model arguments")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NetworkError(f"{origin}: expected finite weights, {key} has NaN or infinity; train it again")
    wanted.update(state)  # keeps the version metadata that some modules read
    net.load_state_dict(wanted)


def _count(what: str, keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{len(keys)} {what}" + (f" ({shown})" if keys else "")


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """A hint if unexpected names are missing ones with a prefix; batch counters are never missing."""
    for key, name in product(unexpected, sorted(missing, key=len, reverse=True)):
        if key.endswith(f".{name}"):
            return f"; its names have the prefix {key.removesuffix(name)!r}: remove it"
    return ""


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
