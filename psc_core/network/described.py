"""Networks whose files describe their classes, the preprocessing of images and the location of the weights.

======================  ============================================================
``hf:DIR``              a folder of transformers (``save_pretrained``), or of timm
``hf:ORG/NAME``         the same in the cache of the Hugging Face hub
``timm:local-dir:DIR``  a folder of timm (``timm.models.save_for_hf``)
``timm:hf-hub:…``       the same in the cache of the Hugging Face hub, ORG/NAME
``onnx:FILE``           an ONNX file, which holds its weights
======================  ============================================================

A network of timm is built by the name of its architecture, so a bundle does not need the folder.  Settings that timm
takes from the folder's ``pretrained_cfg`` instead of its own become arguments: channels, pooling, and the size of the
input if it is fixed.  transformers itself builds a network from its folder; no code in the folder is run.
"""

from __future__ import annotations

import importlib
import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from psc_core.errors import NetworkError, needs
from psc_core.images.described import Aspect, Described, read_processor, read_timm
from psc_core.images.preprocess import PRESETS, Preprocess
from psc_core.network import LIBRARIES
from psc_core.network.onnx_check import files_of_model
from psc_core.network.weights import files_of
from psc_core.text import compose


@dataclass(frozen=True)
class NetworkSpec:
    """How a network is built without its weights, and what its own files say of it; empty is what they do not say."""

    spec: str  # ``family:NAME`` or ``package.module:factory``; of a folder of transformers the folder
    num_classes: int | None = None  # number of logits
    model_args: Mapping[str, Any] = field(default_factory=dict)  # arguments of the builder, JSON types
    folder: Path | None = None  # the folder of all its files
    configuration: Path | None = None  # the file in the folder that says how the network is built
    classes: tuple[str, ...] | None = None  # class names in the order of the logits
    preprocess: Preprocess | None = None  # with which it was trained, as far as PSC supports it
    unlike: Mapping[Aspect, str] = field(default_factory=dict)  # a sentence for each part that this only approximates
    weights: tuple[Path, ...] = ()  # all files with weights

    def __post_init__(self) -> None:
        source, _, name = self.spec.partition(":")
        if not source or not name:
            families = ", ".join(f"{family}:NAME" for family in LIBRARIES)
            raise NetworkError(f"expected {families} or package.module:factory, got {self.spec!r}")

    @property
    def is_factory(self) -> bool:
        """True if building imports code other than torchvision's and timm's."""
        return self.spec.partition(":")[0] not in LIBRARIES

    def with_arguments(self, num_classes: int | None, model_args: Mapping[str, Any]) -> NetworkSpec:
        """Return the spec with what a caller adds to it; the numbers of classes have to agree where both are known."""
        if num_classes is not None and num_classes < 1:
            raise NetworkError(f"expected num_classes of at least 1, got {num_classes}")
        outputs = num_classes or self.num_classes
        if self.num_classes not in (None, outputs):
            raise NetworkError(
                f"{self.spec} is for {self.num_classes} classes, the data has {outputs}; use the data that the network "
                "was trained on"
            )
        return replace(self, num_classes=outputs, model_args={**self.model_args, **model_args})

    def to_json(self) -> dict[str, Any]:
        """Return the fields from which a bundle builds the network again, JSON types."""
        return {"spec": self.spec, "num_classes": self.num_classes, "model_args": dict(self.model_args)}


MAX_JSON: Final = 16 << 20  # maximum size of a JSON file, in bytes; 21,000 class names take 2 MB
_ON_THE_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAFE: Final = ("*.json", "*.safetensors")
_PICKLED: Final = ("pytorch_model*.bin",)
_OF_WEIGHTS: Final = (".safetensors", ".bin", ".pth")


def folder_of(name: str, *, allow_download: bool = False) -> Path:
    """Return the folder ``name``, or the model ORG/NAME in the Hugging Face cache if there is no such folder."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not _ON_THE_HUB.fullmatch(name):
        raise NetworkError(f"there is no folder {folder}; give the folder of a network, or ORG/NAME of the hub")
    hub = needs(f"there is no folder {folder}, and the hub", "hf", "huggingface_hub", error=NetworkError)
    errors = needs("the hub", "hf", "huggingface_hub.errors", error=NetworkError)

    def fetched(patterns: Sequence[str]) -> Path:
        return Path(hub.snapshot_download(name, allow_patterns=[*patterns], local_files_only=not allow_download))

    try:
        found = fetched(_SAFE)
        found = found if any(found.glob("*.safetensors")) else fetched(_PICKLED)
    except errors.LocalEntryNotFoundError as error:
        if allow_download:
            raise NetworkError(f"cannot download {name}: the hub cannot be reached; is there a network?") from error
        raise NetworkError(
            f"there is no folder {name}, and the Hugging Face cache has no model of this name; give --allow-download "
            "to get it from the hub"
        ) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise NetworkError(f"cannot download {name}: {str(error).strip().splitlines()[0]}") from error
    if not allow_download and not any(file.suffix in _OF_WEIGHTS for file in found.iterdir()):
        raise NetworkError(
            f"the Hugging Face cache has no weights of {name}; give --allow-download to get them from the hub"
        )
    return found


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which may be a link, because the hub's cache keeps its files as links."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_JSON:
            raise NetworkError(f"expected {path} to be a regular file of at most {MAX_JSON} bytes; replace it")
        with path.open("rb") as file:
            found = json.loads(file.read(MAX_JSON))
    except OSError as error:
        raise NetworkError(f"cannot read {path}: {error.strerror}; is that the folder of a network?") from error
    except (ValueError, RecursionError) as error:
        raise NetworkError(f"{path} is not JSON ({error}); save the network again") from error
    if not isinstance(found, dict):
        raise NetworkError(f"expected {path} to hold a JSON object, got {type(found).__name__}; save the network again")
    return found


def weights_in(folder: Path, names: Sequence[str]) -> tuple[Path, ...]:
    """Return the weights in a folder: the first of the files ``names``, or the files that it lists as an index."""
    for name in names:
        path = folder / name
        if path.is_file():
            found = files_of(path)[path.suffix == ".json" :]
            for part in found:
                if not part.is_file():
                    raise NetworkError(
                        f"{path} names the file {part.name!r}, which is not beside it; copy the whole folder"
                    )
            return tuple(found)
    raise NetworkError(f"{folder} has no weights, expected one of {', '.join(names)}; save the network again")


CONFIG: Final = "config.json"
TIMM_WEIGHT_FILES: Final = ("model.safetensors", "pytorch_model.bin", "pytorch_model.pth", "model.pth")


def is_of_timm(config: Mapping[str, Any]) -> bool:
    """Return whether a ``config.json`` was written by timm, or by transformers for a timm network."""
    return "architecture" in config and config.get("model_type", "timm_wrapper") == "timm_wrapper"


def describe_timm(folder: Path) -> NetworkSpec:
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
    return NetworkSpec(
        f"timm:{config['architecture']}",
        outputs,
        _arguments(pretrained, model_args),
        folder,
        file,
        _names(names, outputs, file),
        *read_timm(_with_size(pretrained, model_args, file), str(file)),
        weights_in(folder, TIMM_WEIGHT_FILES),
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
    return tuple(map(compose, written))


PROCESSOR: Final = "preprocessor_config.json"
ADAPTER: Final = "adapter_config.json"
WEIGHT_FILES: Final = (
    "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip

_OUTPUTS: Final = 2  # the default number of outputs, which transformers does not write down
_KERNELS: Final = re.compile(r"_?(attn|experts)_implementation(_internal)?")  # settings that choose code
_PYTORCH_KERNELS: Final = ("eager", "sdpa")  # the values of these settings that need nothing but PyTorch
_NO_NAME: Final = re.compile(r"LABEL_\d+")  # the names that transformers gives to classes without names


class Logits(nn.Module):
    """A classifier of transformers that returns its logits as a tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(pixel_values=images, return_dict=True).logits
        return logits


CLASSES: Final = "psc_classes"  # attribute of a loaded network: the class names in its files


def classes_of(net: object) -> tuple[str, ...] | None:
    """Return the class names in the files of a loaded network, or in the configuration of one that :class:`Logits`
    holds; None if it has none.
    """
    labels = getattr(getattr(getattr(net, "model", None), "config", None), "id2label", None)
    if not isinstance(net, Logits) or not isinstance(labels, dict):
        return getattr(net, CLASSES, None)
    return _labels({"id2label": {str(index): name for index, name in labels.items()}}, Path("the network's config"))[1]


def describe_hugging_face(folder: Path) -> NetworkSpec:
    if (folder / ADAPTER).exists():
        raise NetworkError(
            f"{folder} holds an adapter ({ADAPTER}); merge it into its network with merge_and_unload() and save that"
        )
    file = folder / CONFIG
    config = read_json(file)
    if is_of_timm(config):
        return describe_timm(folder)
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
    found: Described = PRESETS["imagenet"], {"whole": f"{folder} has no {PROCESSOR}"}
    if (processor := folder / PROCESSOR).exists():
        found = read_processor(read_json(processor), config, str(processor))
    weights = weights_in(folder, WEIGHT_FILES)
    return NetworkSpec(f"hf:{folder}", outputs, {}, folder, file, classes, *found, weights)


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
    return len(names), tuple(map(compose, names)) if named else None


def load(folder: Path) -> Logits:
    """Build the network in a folder, in float32 and evaluation mode; its ``model`` is that of transformers."""
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
    if surplus := sorted(found["unexpected_keys"]):
        raise NetworkError(
            f"{folder} has weights that its config.json has no place for: {', '.join(surplus[:3])}"
            f"{', …' * (len(surplus) > 3)}; give the config.json that was saved with these weights"
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


def describe(spec: str, *, allow_download: bool = False) -> NetworkSpec:
    """Read what a network's files say of it, which is quick and needs no data."""
    for prefix, describer in DESCRIBERS.items():
        if spec.startswith(prefix):
            found = describer(spec.removeprefix(prefix), allow_download)
            return replace(found, spec=spec) if found.is_factory else found
    return NetworkSpec(spec)


def is_described(spec: str) -> bool:
    return spec.startswith(tuple(DESCRIBERS))


def _describe_file(path: Path) -> NetworkSpec:
    if not path.is_file():
        raise NetworkError(f"there is no file {path}; give the ONNX file that the network was exported to")
    return NetworkSpec(f"onnx:{path}", weights=files_of_model(path))


# The function that describes each family, by the prefix of the spec; it takes the rest and allow_download.
DESCRIBERS: Final[Mapping[str, Callable[[str, bool], NetworkSpec]]] = {
    "hf:": lambda name, download: describe_hugging_face(folder_of(name, allow_download=download)),
    "timm:local-dir:": lambda name, download: describe_timm(folder_of(name, allow_download=download)),
    "timm:hf-hub:": lambda name, download: describe_timm(folder_of(name, allow_download=download)),
    "onnx:": lambda name, _: _describe_file(Path(name).expanduser()),
}
