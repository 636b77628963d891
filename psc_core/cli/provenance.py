"""What a bundle records of its origin, and what of it makes two fits the same job."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from psc_core.cli import flags
from psc_core.data.dataset import ImageDataset
from psc_core.errors import UsageError
from psc_core.version import __version__

LATE_SETTINGS: Final = ("density", "pca", "head", "predictions", "alpha", "coverage", "risk", "ood_score")
"""Flags that only ``fit_psc`` reads, no stage in a checkpoint: changing them after an error does not start again."""

SETTINGS: Final = (
    "layer", "layers", "granularity", "epsilon", "c_proj", "d_proj", "minimum_dim", "no_second_scaling", *LATE_SETTINGS,
    "precision", "batch_images", "max_memory", "seed",
)  # fmt: skip
"""Flags that a bundle records."""


def provenance_of(args: argparse.Namespace, train: ImageDataset, val: ImageDataset) -> dict[str, Any]:
    """Enough to fit the bundle again, and no path of this machine; JSON types."""
    return {
        "psc_version": __version__,
        "model": args.model,
        "model_args": flags.key_values(args.model_arg),
        "weights_sha256": file_digest(args.weights),
        "train": origin_of(train),
        "val": origin_of(val),
        "settings": {key: getattr(args, key) for key in SETTINGS},
    }


def origin_of(data: ImageDataset) -> dict[str, Any]:
    """Name, sizes and digest of a data set."""
    name = os.fsencode(Path(data.name).name).decode(errors="replace")
    return {"name": name, "images": len(data), "rows": data.examples, "sha256": data.digest()}


def job_of(provenance: Mapping[str, Any], train: ImageDataset, device: str) -> dict[str, Any]:
    """What the stages in a checkpoint depend on, JSON types."""
    settings = {key: value for key, value in provenance["settings"].items() if key not in LATE_SETTINGS}
    return {**provenance, "settings": settings, "preprocess": train.preprocess.to_json(), "device": device}


def check_disjoint(train: ImageDataset, val: ImageDataset, provenance: Mapping[str, Any]) -> None:
    """Reject the training images as validation images; the digests of files cover their names and sizes only.

    Raises:
        UsageError: They are the same.
    """
    if provenance["train"]["sha256"] == provenance["val"]["sha256"] and bool((train.image(0) == val.image(0)).all()):
        raise UsageError(
            f"expected --val to be images that the network was not trained on, {val.name} holds the same images as "
            "--train; calibration on training images does not hold for new ones, so hold some images out"
        )


def file_digest(path: Path) -> str:
    """SHA-256, hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
