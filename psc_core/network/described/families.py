"""The specs of networks that describe themselves, and who reads each.

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
    """Read what a network says of itself, which is quick and needs no data.

    Args:
        spec: As of :func:`psc_core.load_network`.
        allow_download: Get from the hub what its cache lacks.

    Returns:
        The description; an empty one for specs that say nothing.

    Raises:
        NetworkError: There is no such folder, or a file in it is missing or malformed.
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
"""Prefix of the spec → function of the rest of it and of whether to download."""
