"""Find a network's folder, on disk or in the Hugging Face cache, and read the JSON files in it."""

from __future__ import annotations

import json
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from psc_core.errors import NetworkError, needs
from psc_core.network.checkpoints import files_of

MAX_JSON: Final = 16 << 20
"""Maximum size of a JSON file, in bytes; 21,000 class names take 2 MB."""

_ON_THE_HUB: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAFE: Final = ("*.json", "*.safetensors")
_PICKLED: Final = ("pytorch_model*.bin",)


def folder_of(name: str, *, allow_download: bool = False) -> Path:
    """Return the folder ``name``, or the model ORG/NAME in the Hugging Face cache if there is no such folder.

    Args:
        name: A path, or ORG/NAME.
        allow_download: Whether to download from the hub what its cache lacks.

    Raises:
        NetworkError: If neither exists.
    """
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
        return found if any(found.glob("*.safetensors")) else fetched(_PICKLED)
    except errors.LocalEntryNotFoundError as error:
        if allow_download:
            raise NetworkError(f"cannot download {name}: the hub cannot be reached; is there a network?") from error
        raise NetworkError(
            f"there is no folder {name}, and the Hugging Face cache has no model of this name; give --allow-download "
            "to get it from the hub"
        ) from error
    except (errors.HfHubHTTPError, OSError, ValueError) as error:
        raise NetworkError(f"cannot download {name}: {str(error).strip().splitlines()[0]}") from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which may be a link, because the hub's cache keeps its files as links.

    Raises:
        NetworkError: If the file is missing, too large, or does not hold a JSON object.
    """
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
    """Return the weights in a folder: the first of the files ``names``, or the files that it lists as an index.

    Raises:
        NetworkError: If there are no weights, or an index lists a file that is not in the folder.
    """
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
