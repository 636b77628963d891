"""Load a network by its *spec*, with the weights of a checkpoint; nothing is ever downloaded.

* ``torchvision:NAME``, ``timm:NAME``: a classification network of the library;
* ``onnx:FILE``, ``hf:DIR``, ``timm:local-dir:DIR``: a network with its weights (:mod:`psc_core.network.described`);
* ``package.module:factory``: a function ``factory(num_classes=…, **model_args) -> nn.Module``.  Importing it runs its
  code: whoever writes the spec permits that, but a factory that a bundle names must be on an allow-list
  (:func:`psc_core.network.cut.rebuild_backbone`).

torchvision's networks accept two more model arguments: ``in_channels`` replaces the first convolution, and
``stem="small"`` adapts ResNets (3×3 stride-1 first convolution, no max-pooling) and VGGs (no last max-pooling, global
average pooling, one linear layer) to 28- and 32-pixel images.  All other arguments go to the builder.  Each library is
imported only when one of its networks is built; torchvision alone takes as long to import as torch.

What takes seconds to find out about a network, its export and the fastest backend for it, is cached in the user's cache
folder (``$XDG_CACHE_HOME/psc``, else ``~/.cache/psc``), which may be deleted at any time and need not be writable.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import inspect
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core import __version__
from psc_core.compute import own_state
from psc_core.errors import NetworkError, PSCError, hint, import_from, needs
from psc_core.network import described
from psc_core.network.described import NetworkSpec, describe
from psc_core.network.onnx import PACKAGES, OnnxNetwork, open_onnx
from psc_core.network.weights import load_weights, read_weights

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
    net: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes, **args)
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
    convolutions = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        raise NetworkError("in_channels needs a network with a convolution; drop the argument")
    name, old = convolutions[0]
    if old.in_channels != in_channels:
        parent, _, attribute = name.rpartition(".")
        settings: Any = {key: getattr(old, key) for key in ("kernel_size", "stride", "padding")}
        first = nn.Conv2d(in_channels, old.out_channels, **settings, bias=old.bias is not None)
        setattr(net.get_submodule(parent), attribute, first)


# Arguments of timm that load files and may unpickle or download them.
_TIMM_FILES: Final = {"checkpoint_path", "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "cache_dir"}


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
    net: nn.Module = timm.create_model(name, pretrained=False, num_classes=num_classes, **args)
    return net


def from_factory(spec: str, num_classes: int, model_args: Mapping[str, Any]) -> nn.Module:
    module, _, name = spec.partition(":")
    if module.startswith(".") or module.endswith(".py") or "/" in module or "\\" in module:
        raise NetworkError(f"expected package.module:factory, not a path, got {spec!r}; give the module's import name")
    try:
        factory = import_from(module, name, error=NetworkError)
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

logger = logging.getLogger("psc.cache")


def need_no_folder() -> None:
    """Keep the import of ``torch.compile``, by torchvision, from making a folder where none can be made."""
    try:
        tempfile.gettempdir()
    except FileNotFoundError:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", os.sep)  # Exists, so that none is made.


def cache_file(suffix: str, *given: bytes) -> Path:
    """Return the path in the cache for a result that depends on ``given`` and the versions of the packages."""
    versions = [torch.__version__, *map(version_of, PACKAGES)]
    key = hashlib.sha256(b"\0".join([json.dumps([__version__, *versions]).encode(), *given])).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser())
    return folder / "psc" / f"{key}.{suffix}"


def version_of(module: str) -> str:
    """Return the version of a module; empty if it cannot be imported or does not tell."""
    try:
        return importlib.metadata.version(module)  # without importing it, which takes seconds
    except importlib.metadata.PackageNotFoundError:
        pass  # another distribution brings it, as onnxruntime-gpu does
    try:
        return str(importlib.import_module(module).__version__)
    except Exception:  # An installation may be broken in any way; whoever needs the module reports it.
        return ""


def read_checked(file: Path) -> bytes | None:
    """Return what :func:`write_checked` wrote, or None; the digest detects damage, not what others have written."""
    try:
        with open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK | os.O_NOFOLLOW)) as kept:
            status = os.fstat(kept.fileno())
            if not (stat.S_ISREG(status.st_mode) and is_private(status) and is_private(file.parent.stat())):
                logger.warning("cache not used", extra={"file": str(file), "reason": "others may write to it"})
                return None
            data = kept.read()
    except OSError:
        return None
    digest, content = data[:32], data[32:]
    return content if hashlib.sha256(content).digest() == digest else None


def is_private(status: os.stat_result) -> bool:
    """Return whether a file or folder belongs to this user and nobody else may write to it."""
    return status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def write_checked(file: Path, content: bytes) -> None:
    """Write bytes after their digest, atomically; do nothing if the cache folder is not writable."""
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, delete=False) as part:
            try:
                part.write(hashlib.sha256(content).digest() + content)
                part.flush()
                Path(part.name).replace(file)
            except OSError:
                Path(part.name).unlink()


ONNX: Final = "onnx:"  # prefix of the spec of a network in an ONNX file
SPEC: Final = "psc_spec"  # attribute of a loaded network: its :class:`NetworkSpec`, from which a bundle rebuilds it
NOTES: Final = "psc_weights_notes"  # attribute of a loaded network: how its weights were found in their file
BUILT_BY_HAND: Final = "no name builds this network again; a bundle holds it as an ONNX graph"
MAX_WEIGHTS: Final = 1 << 31  # maximum number of weights of a network in a bundle (8 GiB in float32)
MAX_MODULES: Final = 1 << 15  # maximum number of modules of a network in a bundle


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

    Examples:
        >>> args = {"stem": "small", "in_channels": 1}
        >>> net = load_network("torchvision:resnet18", num_classes=10, model_args=args)
        >>> net(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """
    file = None if weights is None else Path(weights)
    found = NetworkSpec(spec) if spec.startswith(ONNX) else describe(spec)
    return load_described(found.with_arguments(num_classes, model_args or {}), file)


@own_state()
def load_described(spec: NetworkSpec, weights: Path | None) -> nn.Module:
    """Load a network, in evaluation mode, with the weights of a checkpoint; None for those beside its description."""
    if spec.spec.startswith(ONNX):
        if weights is not None or spec.model_args:
            raise NetworkError(f"{spec.spec} holds its own weights and settings; leave out weights and model arguments")
        return open_onnx(Path(spec.spec.removeprefix(ONNX)).expanduser(), spec.num_classes)
    if spec.folder is not None and spec.is_factory:  # of transformers
        if spec.model_args:
            raise NetworkError(f"{spec.spec} has its own arguments; leave out {', '.join(spec.model_args)}")
        classifier = described.load(spec.folder)
        if weights is not None:
            setattr(classifier, NOTES, _read_into(classifier.model, weights, spec.num_classes))
        return classifier
    net = build(spec)
    setattr(net, described.CLASSES, spec.classes)
    for file in spec.weights if weights is None else (weights,):
        is_silent = spec.spec in _RESCALING and "transform_input" not in spec.model_args
        setattr(net, NOTES, _read_into(net, file, spec.num_classes) + (_RESCALED,) * is_silent)
    return net


# The networks that torchvision makes rescale their inputs if it builds them with its weights; no checkpoint says so.
_RESCALING: Final = ("torchvision:googlenet", "torchvision:inception_v3")
_RESCALED: Final = "was it trained from torchvision's own weights? Then give --model-arg transform_input=true"


def _read_into(net: nn.Module, file: Path, outputs: int | None) -> tuple[str, ...]:
    read = read_weights(file, net.state_dict())
    load_weights(net, read.tensors, num_classes=outputs, origin=read.origin)
    return read.notes


def build(spec: NetworkSpec) -> nn.Module:
    """Build a network without its weights, and read no folder, because somebody else may have written the spec."""
    if spec.num_classes is None:
        raise NetworkError(f"{spec.spec} does not say its number of classes; give num_classes")
    if spec.is_factory:
        net = from_factory(spec.spec, spec.num_classes, spec.model_args)
    else:
        family, _, name = spec.spec.partition(":")
        try:
            net = BUILDERS[family](name, spec.num_classes, spec.model_args)
        except PSCError:
            raise
        except Exception as error:  # a library's errors have no common base class
            told = f"rejects the model arguments {dict(spec.model_args)}" if spec.model_args else "cannot be built"
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise NetworkError(f"{spec.spec} {told}: {reason}") from error
    setattr(net, SPEC, NetworkSpec(spec.spec, spec.num_classes, spec.model_args))
    return net.eval()


def spec_of(net: nn.Module) -> NetworkSpec | None:
    """Return the spec from which a bundle builds a network again; None for a network built by hand."""
    return getattr(net, SPEC, None)


def forget_spec(net: nn.Module) -> None:
    """Remove the spec of a network, so that a bundle stores it as an ONNX graph."""
    setattr(net, SPEC, None)


def notes_of(net: nn.Module) -> tuple[str, ...]:
    """Return notes for the user on how :func:`load_network` found the network in its file."""
    return net.notes if isinstance(net, OnnxNetwork) else getattr(net, NOTES, ())


@contextmanager
def bounded_size(spec: NetworkSpec) -> Iterator[None]:
    """Limit the size of networks built here, for untrusted specs: first on ``meta``, so that no terabytes exist."""
    if not spec.is_factory:
        with _counting(), torch.device("meta"):
            try:
                build(spec)
            except NetworkError as error:
                if not isinstance(error.__cause__, RuntimeError):  # some builders cannot run on it
                    raise
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
