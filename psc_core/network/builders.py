"""Build untrained networks: torchvision's and timm's by name, all others by a factory.

Each library is imported only when one of its networks is built; torchvision alone takes as long to import as torch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Final

from torch import nn

from psc_core.errors import NetworkError, hint, imported, needs

_ELSEWHERE: Final = "see its documentation for names"


def from_torchvision(name: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    import torchvision

    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise NetworkError(f"torchvision has no classification network {name!r}; {hint(name, known, _ELSEWHERE)}")
    args = dict(model_args)
    stem, in_channels = args.pop("stem", None), args.pop("in_channels", None)
    if stem not in (None, "small"):
        raise NetworkError(f"expected model argument stem=small or none, got {stem!r}")
    try:
        net: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **args)
    except (TypeError, ValueError) as error:
        raise NetworkError(f"torchvision:{name} rejects the model arguments {args}: {error}") from error
    if stem == "small":
        _small_stem(net, name, num_classes)
    if in_channels is not None:
        if not isinstance(in_channels, int) or in_channels < 1:
            raise NetworkError(f"expected model argument in_channels to be a positive integer, got {in_channels!r}")
        _set_in_channels(net, in_channels)
    return net


def _small_stem(net: nn.Module, name: str, num_classes: int) -> None:
    import torchvision

    if isinstance(net, torchvision.models.ResNet):
        net.conv1 = nn.Conv2d(3, 64, kernel_size=3, stride=1, padding=1, bias=False)
        net.maxpool = nn.Identity()
    elif isinstance(net, torchvision.models.VGG):
        # 28 pixels allow four of the five halvings: 28 → 14 → 7 → 3 → 1.
        net.features[-1] = nn.Identity()
        net.avgpool = nn.AdaptiveAvgPool2d(1)
        net.classifier = nn.Linear(512, num_classes)
    else:
        raise NetworkError(f"stem=small is for ResNets and VGGs, not torchvision:{name}; drop the argument")


def _set_in_channels(net: nn.Module, in_channels: int) -> None:
    """Replace the first convolution by one with ``in_channels`` input channels."""
    convolutions = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise NetworkError("in_channels needs a network with a convolution; drop the argument")
    name, old = convolutions[0]
    if old.in_channels != in_channels:
        parent, _, attribute = name.rpartition(".")
        settings: Any = {key: getattr(old, key) for key in ("kernel_size", "stride", "padding")}
        first = nn.Conv2d(in_channels, old.out_channels, **settings, bias=old.bias is not None)
        setattr(net.get_submodule(parent), attribute, first)


_TIMM_FILES: Final = {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}
"""Arguments of timm that load files and may unpickle or download them."""


def from_timm(name: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    timm = needs(f"timm:{name}", "timm", "timm", error=NetworkError)
    args = dict(model_args)
    if forbidden := sorted(_TIMM_FILES & set(args)):
        raise NetworkError(
            f"model arguments {', '.join(forbidden)} are not allowed, because they read or download files; give "
            "the weights as a separate file"
        )
    if "in_channels" in args:
        args["in_chans"] = args.pop("in_channels")
    if not timm.is_model(name):
        raise NetworkError(f"timm has no network {name!r}; {hint(name, timm.list_models(), _ELSEWHERE)}")
    try:
        net: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **args)
    except (TypeError, ValueError, AssertionError) as error:
        raise NetworkError(f"timm:{name} rejects the model arguments {args}: {error}") from error
    return net


def from_factory(spec: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    module, _, name = spec.partition(":")
    if module.startswith(".") or module.endswith(".py") or "/" in module or "\\" in module:
        raise NetworkError(f"expected package.module:factory, not a path, got {spec!r}; give the module's import name")
    try:
        factory = imported(module, name, error=NetworkError)
    except (ImportError, AttributeError) as error:
        raise NetworkError(f"cannot import the factory {spec}: {error}") from error
    try:
        inspect.signature(factory).bind(num_classes=num_classes, **model_args)
    except (TypeError, ValueError) as error:
        given = ", ".join(["num_classes", *model_args])
        raise NetworkError(
            f"expected {spec} to take the arguments ({given}): {error}; name a function that takes them and "
            "returns the network"
        ) from error
    net = factory(num_classes=num_classes, **model_args)
    if not isinstance(net, nn.Module):
        raise NetworkError(f"expected {spec} to return an nn.Module, got {type(net).__name__}")
    return net


BUILDERS: Mapping[str, Callable[[str, int, Mapping[str, Any]], nn.Module]] = {
    "torchvision": from_torchvision,
    "timm": from_timm,
}
