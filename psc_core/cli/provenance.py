"""Record the origin of a bundle, and decide by it whether two fits are the same job."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from psc_core.compute.passes import Compute
from psc_core.data.dataset import ImageDataset
from psc_core.fitting.data import FitData
from psc_core.network.checkpoints import files_of
from psc_core.network.described.families import is_described
from psc_core.network.load import Recipe
from psc_core.settings import FitSettings
from psc_core.version import __version__


def provenance_of(recipe: Recipe, weights: Sequence[Path], settings: FitSettings, data: FitData) -> dict[str, Any]:
    """Return everything that fitting the bundle again needs, without any path of this machine; JSON types."""
    return {
        "psc_version": __version__,
        "model": without_path(recipe.spec),
        "model_args": dict(recipe.model_args),
        "weights_sha256": digest_of([file for path in weights for file in files_of(path)]),
        **origins_of(data),
        "settings": settings.recorded(),
    }


def origins_of(data: FitData) -> dict[str, Any]:
    """Return the part of the provenance that changes when images are left out; JSON types."""
    return {"train": origin_of(data.train, data.left_out[0]), "val": origin_of(data.val, data.left_out[1])}


def without_path(spec: str) -> str:
    """Return the spec of a network with the path of its file or folder, where it has one, cut down to the name."""
    family, _, name = spec.partition(":")
    is_path = is_described(spec) and Path(name).expanduser().exists()
    return f"{family}:{_printable(name)}" if is_path else spec


def _printable(path: str) -> str:
    """Return the last name in a path as text that UTF-8 can hold."""
    return os.fsencode(Path(path).resolve().name).decode(errors="replace")


def origin_of(data: ImageDataset, left_out: int) -> dict[str, Any]:
    """Return name, sizes and digest of a data set, and how many images were left out of it."""
    return {
        "name": _printable(data.name),
        "images": len(data),
        "rows": data.examples,
        "sha256": data.digest(),
        "left_out": left_out,
    }


def job_of(
    provenance: Mapping[str, Any],
    settings: FitSettings,
    data: FitData,
    compute: Compute,
    configuration: Path | None = None,
) -> dict[str, Any]:
    """Return the inputs of the stages in a checkpoint, JSON types; ``configuration`` is a file of the network.

    Image files count by name, size and the time of their last change: an edited bitmap keeps its size.
    """
    on = {
        "preprocess": data.train.preprocess.to_json(),
        "modified": [_modified(data.train), _modified(data.val)],
        "device": compute.device.type,
        "configuration": None if configuration is None else digest_of([configuration]),
    }
    return {**provenance, "settings": settings.of_stages(), **on}


def _modified(data: ImageDataset) -> str:
    """Return a digest of when each image file was last changed; copies have other times, so no bundle records it."""
    times = (data.source.modified_ns(index) for index in data.indices.tolist())
    return hashlib.sha256(b"".join(b"%d\n" % time for time in times)).hexdigest()


def digest_of(files: Sequence[Path]) -> str:
    """Return the SHA-256 of the files one after the other, hexadecimal."""
    sha = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            hashlib.file_digest(file, lambda: sha)
    return sha.hexdigest()
