"""Images on disk in the ImageFolder layout: one folder per class, ``class/file.png``."""

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
"""Suffixes of image files; other files are ignored."""


def image_folder(
    root: Path, preprocess: Preprocess, *, labelled_images: bool = True, empty_classes: bool = False
) -> ImageDataset:
    """The images below ``root``; each folder in it is a class, in name order.

    Args:
        root: The directory.
        preprocess: How the images are read.
        labelled_images: When false, all images below ``root`` are one class.
        empty_classes: Accept class folders without images, for test sets that lack a class.

    Raises:
        DataError: Not a directory, no class folders, a class without images, or a class name that is not UTF-8.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a directory; give a directory of images")
    folders = sorted(entry for entry in root.iterdir() if entry.is_dir()) if labelled_images else [root]
    if not folders:
        raise DataError(f"{root} has no class folders; lay out the images as class/file.png")
    names: list[npt.NDArray[Any]] = []
    for label, folder in enumerate(folders):
        if labelled_images and folder.name.encode(errors="replace").decode() != folder.name:
            raise DataError(f"{root} has a class folder whose name is not UTF-8, {folder.name!r}; rename it")
        files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES)
        if not files and not empty_classes:
            raise DataError(
                f"class folder {label + 1} of {len(folders)}, {folder}, has no images "
                f"({', '.join(SUFFIXES)}); add some or remove the folder"
            )
        names.append(np.array([os.fsencode(path.relative_to(root)) for path in files], dtype=np.bytes_))
    if not any(map(len, names)):
        raise DataError(f"{root} has no images ({', '.join(SUFFIXES)}); add some")
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(files) for files in names]))
    source = FileSource(root, np.concatenate(names))
    return labelled(str(root), [folder.name for folder in folders], source, labels, preprocess)
