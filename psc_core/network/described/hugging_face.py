"""Read folders of transformers (``save_pretrained``): ``config.json``, ``preprocessor_config.json`` and weights.

transformers itself builds the network from the folder; no code in the folder is run, and nothing is downloaded.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, needs
from psc_core.images.preparation import Preparation, read_processor
from psc_core.images.preprocess import PRESETS
from psc_core.names import composed
from psc_core.network.described import timm
from psc_core.network.described.base import Described
from psc_core.network.described.files import read_json, weights_in

CONFIG: Final = "config.json"
PROCESSOR: Final = "preprocessor_config.json"
ADAPTER: Final = "adapter_config.json"
WEIGHT_FILES: Final = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip

_OUTPUTS: Final = 2
"""The default number of outputs, which transformers does not write down."""

_KERNELS: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?")
"""The settings that choose the code of an operation, possibly code from the hub."""

_PYTORCH_KERNELS: Final = ("eager", "sdpa")
"""The values of these settings that need nothing but PyTorch."""

_NO_NAME: Final = re.compile(r"LABEL_\d+")
"""The names that transformers gives to classes without names."""


class Logits(nn.Module):
    """A classifier of transformers that returns its logits as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images, return_dict=True).logits
        return logits


def classes_of(net: object) -> tuple[str, ...] | None:
    """Return the class names of a network that :class:`Logits` holds, by its configuration; None if it says none.

    Raises:
        NetworkError: If the names are not those of the outputs.
    """
    labels = getattr(getattr(getattr(net, "model", None), "config", None), "id2label", None)
    if not isinstance(net, Logits) or not isinstance(labels, dict):
        return None
    return _labels({"id2label": {str(index): name for index, name in labels.items()}}, Path("the network's config"))[1]


def describe(folder: Path) -> Described:
    """Read the description of a network in a folder of transformers or timm, from its JSON files only.

    Raises:
        NetworkError: If a file is missing or malformed, or the network needs more than transformers.
    """
    if (folder / ADAPTER).exists():
        raise NetworkError(
            f"{folder} holds an adapter ({ADAPTER}); merge it into its network with merge_and_unload() and save that"
        )
    file = folder / CONFIG
    config = read_json(file)
    if timm.is_of_timm(config):
        return timm.describe(folder)
    if config.get("auto_map"):
        raise NetworkError(
            f"{file} names code of its own (auto_map), which PSC does not run; build the network in a function and "
            "give that as package.module:function"
        )
    _check_kernels(config, file)
    if config.get("quantization_config"):
        raise NetworkError(f"{file} belongs to a quantised network; save it in float32")
    if not isinstance(config.get("model_type"), str):
        raise NetworkError(f"{file} has no model_type, so transformers did not write it; check the folder")
    outputs, classes = _labels(config, file)
    return Described(
        folder=folder,
        configuration=file,
        outputs=outputs,
        classes=classes,
        preparation=_preparation(folder, config),
        weights=weights_in(folder, WEIGHT_FILES),
    )


def _check_kernels(config: Mapping[str, Any], file: Path) -> None:
    """Refuse settings, at any depth, that would make transformers load code from elsewhere."""
    waiting: list[tuple[str, Any]] = [("", config)]
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, dict):
            waiting += [(name or (key if _KERNELS.fullmatch(key) else ""), part) for key, part in value.items()]
        elif isinstance(value, list):
            waiting += [(name, part) for part in value]
        elif name and value is not None and value not in _PYTORCH_KERNELS:
            raise NetworkError(
                f"{file} asks for code from elsewhere ({name} {value!r:.100}), which is not run; remove it, or set it "
                f"to one of {', '.join(_PYTORCH_KERNELS)}"
            )


def _labels(config: Mapping[str, Any], file: Path) -> tuple[int, tuple[str, ...] | None]:
    """Return the number of outputs, and their names if they have some."""
    labels = config.get("id2label")
    if labels is None:
        outputs = config.get("num_labels") or _OUTPUTS
        if type(outputs) is not int or outputs < 1:
            raise NetworkError(f"expected num_labels of {file} to be a positive number, got {outputs!r:.100}; fix it")
        return outputs, None
    if not isinstance(labels, dict) or not labels or {str(i) for i in range(len(labels))} != {*labels}:
        raise NetworkError(f"expected id2label of {file} to name the outputs 0, 1, …; fix it")
    names = [labels[str(i)] for i in range(len(labels))]
    if not all(isinstance(name, str) for name in names):
        raise NetworkError(f"expected id2label of {file} to hold names; fix it")
    named = len(names) > 1 and not all(map(_NO_NAME.fullmatch, names))
    return len(names), tuple(map(composed, names)) if named else None


def _preparation(folder: Path, config: Mapping[str, Any]) -> Preparation:
    file = folder / PROCESSOR
    if not file.exists():
        return Preparation(PRESETS["imagenet"], {"whole": f"{folder} has no {PROCESSOR}"})
    return read_processor(read_json(file), config, str(file))


def load(folder: Path) -> Logits:
    """Build the network in a folder, in float32 and evaluation mode; its module ``model`` is the one of transformers.

    Raises:
        NetworkError: If transformers is missing or cannot build it, or the folder lacks some of its weights.
    """
    transformers = needs(f"hf:{folder}", "hf", "transformers", error=NetworkError)
    safe = weights_in(folder, WEIGHT_FILES)[0].suffix == ".safetensors"
    try:
        with _quiet():
            model, found = transformers.AutoModelForImageClassification.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=safe,
                dtype=torch.float32,
                ignore_mismatched_sizes=True,  # reported below, with the missing ones
                output_loading_info=True,
            )
    except Exception as error:  # each architecture raises its own error
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise NetworkError(f"transformers cannot load {folder}: {type(error).__name__}: {reason}") from error
    if absent := sorted({*found["missing_keys"], *(name for name, *_ in found["mismatched_keys"])}):
        raise NetworkError(
            f"{folder} has no weights of the right shape for {', '.join(absent[:3])}{', …' * (len(absent) > 3)}; is it "
            "a trained classifier?"
        )
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise NetworkError(f"{folder}: expected finite weights, {name} has NaN or infinity; train it again")
    for module in model.modules():
        if hasattr(module, "config"):  # parts read it even if the caller passes return_dict
            module.config.return_dict = True
    classifier: Logits = Logits(model).eval()
    return classifier


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of transformers in this context, and the warnings that :func:`load` reports itself."""
    logging: Any = importlib.import_module("transformers.utils.logging")
    verbosity, shows_progress = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if shows_progress:
            logging.enable_progress_bar()
