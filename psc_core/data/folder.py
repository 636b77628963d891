"""The ImageFolder layout: one folder a class, ``class/file.png``."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import FileSource
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""File names an ImageFolder directory is searched for."""


def image_folder(
    root: Path, preprocess: Preprocess, *, labelled_images: bool = True, empty_classes: bool = False
) -> ImageDataset:
    """The ImageFolder layout: one directory a class, sorted by name; without labels, every image below ``root``.

    With ``empty_classes`` the folder of a class may be empty, as where a test set has no image of it.
    """
    if not root.is_dir():
        raise DataError(f"expected a directory of images, {root} is not one")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if labelled_images else [root]
    if not folders:
        raise DataError(f"expected one folder a class in {root}, it has none; lay images out as class/file.png")
    names: list[npt.NDArray[Any]] = []
    for label, folder in enumerate(folders):
        if labelled_images and folder.name.encode(errors="replace").decode() != folder.name:
            raise DataError(f"expected class folders named in UTF-8, {root} has {folder.name!r}; rename it")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files and not empty_classes:
            raise DataError(
                f"class folder {label + 1} of {len(folders)}, {folder}, has no images "
                f"({', '.join(SUFFIXES)}); add some or remove the folder"
            )
        names.append(np.array([os.fsencode(path.relative_to(root)) for path in files], dtype=np.bytes_))
    if not any(map(len, names)):
        raise DataError(f"expected images ({', '.join(SUFFIXES)}) in {root}, it has none; add some")
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(files) for files in names]))
    source = FileSource(root, np.concatenate(names))
    return labelled(str(root), [folder.name for folder in folders], source, labels, preprocess)
