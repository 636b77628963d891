"""Read folders of timm (``timm.models.save_for_hf``): ``config.json`` and ``model.safetensors``.

The network is built by the name of its architecture, so a bundle does not need the folder.  Settings that timm takes
from the folder's ``pretrained_cfg`` instead of its own become arguments: channels, pooling, and the size of the input
if it is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psc_core.errors import NetworkError
from psc_core.images.preparation import read_timm
from psc_core.names import composed
from psc_core.network.described.base import Described
from psc_core.network.described.files import read_json, weights_in

CONFIG: Final = "config.json"
WEIGHT_FILES: Final = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")


def is_of_timm(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` was written by timm, or by transformers for a timm network."""
    return "architecture" in config and config.get("model_type", "timm_wrapper") == "timm_wrapper"


def describe(folder: Path) -> Described:
    """Read the description of a timm network in a folder, from its JSON files only.

    Raises:
        NetworkError: If a file is missing or malformed.
    """
    file = folder / CONFIG
    config = read_json(file)
    if not is_of_timm(config) or not isinstance(config["architecture"], str):
        raise NetworkError(f"{file} names no architecture of timm; is it a folder for hf:{folder}?")
    # Older files keep the settings of the weights at the top level.
    pretrained = config.get("pretrained_cfg", config)
    model_args = config.get("model_args") or {}
    if not isinstance(pretrained, dict) or not isinstance(model_args, dict):
        raise NetworkError(f"expected pretrained_cfg and model_args of {file} to be JSON objects; save it again")
    outputs = model_args.get("num_classes", config.get("num_classes", pretrained.get("num_classes")))
    if type(outputs) is not int or outputs < 1:
        raise NetworkError(f"expected {file} to have a positive num_classes, got {outputs!r:.100}; use a classifier")
    names = config.get("label_names") or pretrained.get("label_names") or pretrained.get("labels")
    return Described(
        spec=f"timm:{config['architecture']}",
        model_args=_arguments(pretrained, model_args),
        folder=folder,
        configuration=file,
        outputs=outputs,
        classes=_names(names, outputs, file),
        preparation=read_timm(_with_size(pretrained, model_args, file), str(file)),
        weights=weights_in(folder, WEIGHT_FILES),
    )


def _arguments(pretrained: Mapping[str, Any], model_args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that build the folder's network by name, without ``num_classes``, which is passed apart."""
    implied: dict[str, Any] = {}
    size = pretrained.get("input_size")
    if isinstance(size, list) and len(size) == 3:
        if size[0] != 3:
            implied["in_chans"] = size[0]
        if pretrained.get("fixed_input_size"):
            implied["img_size"] = size[1:]
    if pretrained.get("global_pool"):
        implied["global_pool"] = pretrained["global_pool"]
    return {name: value for name, value in {**implied, **model_args}.items() if name != "num_classes"}


def _with_size(pretrained: Mapping[str, Any], model_args: Mapping[str, Any], file: Path) -> dict[str, Any]:
    """Return ``pretrained`` with the channels, and the fixed size, that the model arguments set."""
    size = pretrained.get("input_size") or [3, 224, 224]
    if not isinstance(size, list):
        return dict(pretrained)
    if model_args.get("in_chans"):
        size = [model_args["in_chans"], *size[1:]]
    fixed = model_args.get("img_size")
    if fixed and pretrained.get("fixed_input_size"):
        sides = [fixed, fixed] if type(fixed) is int else fixed
        if not isinstance(sides, list) or [type(side) for side in sides] != [int, int]:
            raise NetworkError(
                f"expected img_size among the model_args of {file} to be one or two numbers, got {fixed!r:.100}; fix it"
            )
        size = [*size[:1], *sides]
    return {**pretrained, "input_size": size}


def _names(written: Any, outputs: int, file: Path) -> tuple[str, ...] | None:
    """Return the class names in the order of the outputs; None if there are no names, or gaps in their numbers."""
    if isinstance(written, dict):
        numbered = [written.get(str(i)) for i in range(outputs)] if len(written) >= outputs else [None]
        written = None if None in numbered else numbered
    if written is None or outputs < 2:
        return None
    if not isinstance(written, list) or len(written) != outputs or not all(isinstance(name, str) for name in written):
        raise NetworkError(f"expected {outputs} label_names in {file}, one for each output; fix it")
    return tuple(map(composed, written))
