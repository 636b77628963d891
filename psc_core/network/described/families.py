"""The specs of networks that describe themselves, and the reader of each.

======================  ============================================================
``hf:DIR``              a folder of transformers, or of timm
``hf:ORG/NAME``         the same in the cache of the Hugging Face hub
``timm:local-dir:DIR``  a folder of timm
``timm:hf-hub:…``       the same in the cache of the Hugging Face hub, ORG/NAME
``onnx:FILE``           an ONNX file, which holds its weights
======================  ============================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from psc_core.errors import NetworkError
from psc_core.network.described import hugging_face, timm
from psc_core.network.described.base import Described
from psc_core.network.described.files import folder_of
from psc_core.network.onnx.model import files_of_model


def describe(spec: str, *, allow_download: bool = False) -> Described:
    """Read a network's description of itself, which is quick and needs no data.

    Args:
        spec: A spec for :func:`psc_core.load_network`.
        allow_download: Whether to download from the hub what its cache lacks.

    Returns:
        The description, which is empty if the spec's family has none.

    Raises:
        NetworkError: If the folder is missing, or a file in it is missing or malformed.
    """
    for prefix, describer in DESCRIBERS.items():
        if spec.startswith(prefix):
            return describer(spec.removeprefix(prefix), allow_download)
    return Described()


def is_described(spec: str) -> bool:
    """Return whether networks of this spec describe themselves."""
    return spec.startswith(tuple(DESCRIBERS))


def _in_folder(describe_folder: Callable[[Path], Described]) -> Callable[[str, bool], Described]:
    return lambda name, allow_download: describe_folder(folder_of(name, allow_download=allow_download))


def _describe_file(path: Path) -> Described:
    if not path.is_file():
        raise NetworkError(f"there is no file {path}; give the ONNX file that the network was exported to")
    return Described(weights=files_of_model(path))


DESCRIBERS: Final[Mapping[str, Callable[[str, bool], Described]]] = {
    "hf:": _in_folder(hugging_face.describe),
    "timm:local-dir:": _in_folder(timm.describe),
    "timm:hf-hub:": _in_folder(timm.describe),
    "onnx:": lambda name, _: _describe_file(Path(name).expanduser()),
}
"""The function that describes each family, by the prefix of the spec; it takes the rest and allow_download."""
