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

import difflib
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import safetensors.torch
import torch
import torchvision
from safetensors import SafetensorError
from torch import Tensor, nn

from psc_core.errors import NetworkError

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
        return self.spec.partition(":")[0] not in _BUILDERS

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
        net = _from_factory(recipe, allow_factories)
    else:
        net = _BUILDERS[source](name, num_classes, recipe.model_args)
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


# -- builders -------------------------------------------------------------------------------------------------


def _from_torchvision(name: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise NetworkError(f"expected a classification network of torchvision, got {name!r}; {_near(name, known)}")
    args = dict(model_args)
    stem, in_channels = args.pop("stem", None), args.pop("in_channels", None)
    if stem not in (None, "small"):
        raise NetworkError(f"expected model argument stem=small or none, got {stem!r}")
    try:
        net: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **args)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"torchvision:{name} refuses the model arguments {args}: {error}") from error
    if stem == "small":
        _small_stem(net, name, num_classes)
    if in_channels is not None:
        if not isinstance(in_channels, int) or in_channels < 1:
            raise NetworkError(f"expected model argument in_channels to be a positive integer, got {in_channels!r}")
        _set_in_channels(net, in_channels)
    return net


def _small_stem(net: nn.Module, name: str, num_classes: int) -> None:
    if isinstance(net, torchvision.models.ResNet):
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif isinstance(net, torchvision.models.VGG):
        # 28 pixels survive four of the five halvings: 28 → 14 → 7 → 3 → 1.
        net.features[-1] = nn.Identity()
        net.avgpool = nn.AdaptiveAvgPool2d(1)
        net.classifier = nn.Linear(512, num_classes)
    else:
        raise NetworkError(f"expected a ResNet or VGG for stem=small, got torchvision:{name}; drop the argument")


def _set_in_channels(net: nn.Module, in_channels: int) -> None:
    """Replace the first convolution by one that reads ``in_channels`` channels."""
    for name, module in net.named_modules():
        if isinstance(module, nn.Conv2d):
            if module.in_channels == in_channels:
                return
            parent, _, attribute = name.rpartition(".")
            first = nn.Conv2d(
                in_channels,
                module.out_channels,
                kernel_size=module.kernel_size,  # type: ignore[arg-type]
                stride=module.stride,  # type: ignore[arg-type]
                padding=module.padding,  # type: ignore[arg-type]
                bias=module.bias is not None,
            )
            setattr(net.get_submodule(parent), attribute, first)
            return
    raise NetworkError("expected a network that starts with a convolution for in_channels, found none")


_TIMM_FILES: Final = frozenset(
    {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
)
"""Arguments of timm that load (and may unpickle or download) something."""


def _from_timm(name: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise NetworkError(f"timm:{name} needs timm, which is not installed; pip install 'psc[timm]'") from error
    args = dict(model_args)
    forbidden = sorted(_TIMM_FILES & set(args))
    if forbidden:
        raise NetworkError(
            f"expected model arguments that shape the network, {', '.join(forbidden)} would read files "
            "or the network; give weights as a safetensors file"
        )
    if "in_channels" in args:
        args["in_chans"] = args.pop("in_channels")
    if not timm.is_model(name):
        raise NetworkError(f"expected a network of timm, got {name!r}; {_near(name, timm.list_models())}")
    try:
        net: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise NetworkError(f"timm:{name} refuses the model arguments {args}: {error}") from error
    return net


def _from_factory(recipe: Recipe, allow_factories: Collection[str]) -> nn.Module:
    module, _, name = recipe.spec.partition(":")
    if module.startswith(".") or module.endswith(".py") or "/" in module or "\\" in module:
        raise NetworkError(
            f"expected package.module:factory, not a path, got {recipe.spec!r}; give the name that Python imports it by"
        )
    if recipe.spec not in allow_factories:
        raise NetworkError(
            f"the factory {recipe.spec} is not on the allow-list {sorted(allow_factories)}; importing it runs its "
            "code, so add it there only if you trust it"
        )
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise NetworkError(f"expected an importable package.module:factory, {recipe.spec} is not: {error}") from error
    try:
        inspect.signature(factory).bind(num_classes=recipe.num_classes, **recipe.model_args)
    except (TypeError, ValueError) as error:
        given = ", ".join(["num_classes", *recipe.model_args])
        raise NetworkError(f"expected {recipe.spec} to take the arguments ({given}): {error}") from error
    net = factory(num_classes=recipe.num_classes, **recipe.model_args)
    if not isinstance(net, nn.Module):
        raise NetworkError(f"expected {recipe.spec} to return an nn.Module, got {type(net).__name__}")
    return net


_BUILDERS: Mapping[str, Callable[[str, int, Mapping[str, Any]], nn.Module]] = {
    "torchvision": _from_torchvision,
    "timm": _from_timm,
}


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=3)
    return f"did you mean {', '.join(close)}?" if close else "see its documentation for the names"


# -- weights --------------------------------------------------------------------------------------------------


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a safetensors file, on the CPU.

    Raises:
        NetworkError: No such file, or not a safetensors file.
    """
    if not path.is_file():
        raise NetworkError(f"expected a safetensors file of weights, there is no file {path}")
    try:
        return safetensors.torch.load_file(path)
    except (SafetensorError, ValueError) as error:
        raise NetworkError(
            f"expected a safetensors file, {path} is not one ({error}); convert a PyTorch checkpoint with "
            "safetensors.torch.save_file(net.state_dict(), FILE)"
        ) from error


def load_weights(net: nn.Module, state: Mapping[str, Tensor], *, num_classes: int, origin: str) -> None:
    """Copy ``state`` into ``net``, every tensor accounted for.

    Batch counters (``num_batches_tracked``) may be absent: evaluation never reads them.

    Raises:
        NetworkError: Missing, unexpected, wrongly shaped or non-finite tensors; ``origin`` names the source.
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
            if expected and got and expected[0] == num_classes and expected[1:] == got[1:]:
                raise NetworkError(
                    f"{origin} is for {got[0]} classes ({key} is {got}), the data has {num_classes}; use the data "
                    "the network was trained for"
                )
            raise NetworkError(f"{origin}: expected {key} of shape {expected}, got {got}; check the model arguments")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NetworkError(f"{origin}: expected finite weights, {key} holds NaN or infinity; train it again")
    wanted.update(state)  # keeps the versions that some modules ask for
    net.load_state_dict(wanted)


def _count(what: str, keys: list[str]) -> str:
    shown = ", ".join(keys[:3]) + (", …" if len(keys) > 3 else "")
    return f"{len(keys)} {what}" + (f" ({shown})" if keys else "")


def _prefix_hint(missing: list[str], unexpected: list[str]) -> str:
    """Which prefix would make a missing name of an unexpected one; batch counters are never missing."""
    endings = tuple(f".{name}" for name in missing)
    for key in unexpected:
        if key.endswith(endings):
            name = max((ending[1:] for ending in endings if key.endswith(ending)), key=len)
            return f"; its names carry the prefix {key.removesuffix(name)!r}: remove it"
    return ""
