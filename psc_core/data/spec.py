"""Open a data set by its *spec*:

* ``DIR``: the ImageFolder layout, ``class/file.png``;
* ``FILE.csv``, ``FILE.tsv`` or ``FILE.parquet``: a table of image files and their classes, or their numbers
  (:mod:`psc_core.data.table`);
* ``mnist:ROOT``, ``fashion-mnist:ROOT``, ``ambiguous-mnist:ROOT``, ``dirty-mnist:ROOT``, ``cifar10:ROOT``,
  ``rotated-mnist:ROOT``: a named data set whose files are below ``ROOT`` (:mod:`psc_core.data.builtin`);
* ``package.module:factory``: a function ``factory(split=…, preprocess=…) -> ImageDataset``.

``#train``, ``#val`` or ``#test`` after a spec overrides the split that the caller asks for.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from psc_core.data.builtin import BUILT_IN
from psc_core.data.dataset import ImageDataset, labelled
from psc_core.data.sources import FileSource
from psc_core.data.table import TABLE_SUFFIXES, Column, open_table
from psc_core.errors import DataError, UsageError, imported
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below, is_hidden, unread_below, unread_beside
from psc_core.images.preprocess import Preprocess
from psc_core.images.transforms import as_preprocess

SPLITS = ("train", "val", "test")


def open_dataset(
    spec: str,
    *,
    split: str,
    preprocess: Any,
    labelled_images: bool = True,
    numbers: bool | None = None,
    target: str | None = None,
    unit: str = "",
) -> ImageDataset:
    """Open the data set that ``spec`` names; see the module docstring.

    Args:
        split: ``"train"``, ``"val"`` or ``"test"``.  A directory is the same for every split, but each of its class
            folders must hold images only for ``"train"``.
        preprocess: How the images are read: a :class:`psc_core.Preprocess`, or what else
            :func:`psc_core.images.transforms.as_preprocess` takes.
        labelled_images: If false, all images of a directory or table form one class (out-of-distribution sets).
        numbers: Whether a table holds numbers or, if false, class names or indices; None: numbers are numbers, text is
            classes.
        target: The column of a table that holds the classes or numbers; None if there is only one.
        unit: The unit of the numbers in a table.

    Raises:
        DataError: If the spec, the directory or its layout is invalid.
        UsageError: If a table lacks the target, or ``target`` or ``unit`` is given and ``spec`` names no table.

    Example:
        >>> from psc_core import PRESETS, open_dataset
        >>> test = open_dataset("mnist:tests/data", split="test", preprocess=PRESETS["mnist"])
        >>> len(test), len(test.classes)
        (800, 10)
    """
    preprocess = as_preprocess(preprocess)
    body, chosen = _parted(spec)
    split = chosen or split
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got {split!r} in {spec!r}")
    if is_table(spec):
        return open_table(Path(body), preprocess, Column(target, numbers, unit) if labelled_images else None)
    if target is not None or unit:
        given = f"target {target!r}" if target is not None else f"unit {unit!r}"
        raise UsageError(
            f"{spec} is no table, so {given} has no effect; leave it out, or give a table of images "
            f"({', '.join(TABLE_SUFFIXES)})"
        )
    family, rest = _family(body)
    if family is not None and family in BUILT_IN:
        return BUILT_IN[family](Path(rest), split, preprocess)
    if family is not None:
        return _from_factory(family, rest, split, preprocess)
    return image_folder(Path(body), preprocess, labelled_images=labelled_images, empty_classes=split != "train")


def is_table(spec: str) -> bool:
    """Return whether a spec names a table, the only data set that may need a target and a unit."""
    body, _ = _parted(spec)
    is_path = _family(body)[0] is None
    return is_path and Path(body).suffix.lower() in TABLE_SUFFIXES and not Path(body).is_dir()


def _family(body: str) -> tuple[str | None, str]:
    """Return what a spec without its split has before and after a colon, or None and the spec if it is a path."""
    family, separator, rest = body.partition(":")
    is_named = separator and (family in BUILT_IN or ("/" not in family and not Path(body).exists()))
    return (family, rest) if is_named else (None, body)


def _parted(spec: str) -> tuple[str, str]:
    """Return a spec without the split at its end, and that split; empty without one."""
    body, mark, chosen = spec.rpartition("#")
    return (spec, "") if not mark or Path(spec).exists() else (body, chosen)  # A "#" may belong to the name.


def image_folder(
    root: Path, preprocess: Preprocess, *, labelled_images: bool = True, empty_classes: bool = False
) -> ImageDataset:
    """Open the images below ``root``; each of its folders is a class, in name order.

    Hidden files and folders, such as a notebook's ``.ipynb_checkpoints`` and a Mac's ``._1.jpg``, are skipped.  Without
    ``labelled_images`` all images form one class.  ``empty_classes`` accepts class folders without images, for test
    sets that lack a class.

    Raises:
        DataError: If it is not a directory, has no class folders, a class without images, or a name that is not UTF-8.
    """
    if not root.is_dir():
        raise DataError(f"{root} is not a directory; give a directory of images")
    below = (entry for entry in root.iterdir() if entry.is_dir() and not is_hidden(entry.name))
    folders = sorted(below) if labelled_images else [root]
    if not folders:
        raise DataError(f"{root} has no class folders; lay out the images as class/file.png")
    names: list[npt.NDArray[Any]] = []
    for label, folder in enumerate(folders):
        if labelled_images and folder.name.encode(errors="replace").decode() != folder.name:
            raise DataError(f"{root} has a class folder whose name is not UTF-8, {folder.name!r}; rename it")
        files = sorted(path for path in map(Path, files_below(folder)) if path.suffix.lower() in SUFFIXES)
        if not files and not empty_classes:
            raise DataError(
                f"class folder {label + 1} of {len(folders)}, {folder}, has no images "
                f"({', '.join(SUFFIXES)}); add two or more, or remove the folder of a class that the network lacks"
            )
        names.append(np.array([os.fsencode(path.relative_to(root)) for path in files], dtype=np.bytes_))
    if not any(map(len, names)):
        raise DataError(f"{root} has no images ({', '.join(SUFFIXES)}); add some")
    labels = torch.arange(len(folders)).repeat_interleave(torch.tensor([len(files) for files in names]))
    source = FileSource(root, np.concatenate(names))
    classes = [folder.name.encode(errors="replace").decode() for folder in folders]  # One class may have any name.
    data = labelled(str(root), classes, source, labels, preprocess)
    if [*data.classes] == sorted(data.classes):
        return data
    note = (
        f"{root}: the classes are in the order of the folders' names as the disk has them, which are decomposed (NFD, "
        "as a Mac writes them) or begin with a blank; a network that was trained on composed names has them in another "
        "order: convmv -r -f utf8 -t utf8 --nfc --notest renames the folders"
    )
    return replace(data, notes=(note,))


def unread_files(data: ImageDataset) -> tuple[str, ...]:
    """Return lines that count the files that are not read of a folder of images with classes; of others none."""
    match data.source:
        case FileSource(root=root) if str(root) == data.name:
            return tuple(filter(None, (unread_beside(root), unread_below(root))))
    return ()


def _from_factory(module: str, name: str, split: str, preprocess: Preprocess) -> ImageDataset:
    if not module or module.startswith("."):
        raise DataError(f"expected package.module:factory, not a path, got {module}:{name}")
    try:
        factory = imported(module, name, error=DataError)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"expected a directory, one of {', '.join(f'{k}:ROOT' for k in BUILT_IN)}, or "
            f"package.module:factory; {module}:{name} cannot be imported ({error})"
        ) from error
    dataset = factory(split=split, preprocess=preprocess)
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"expected {module}:{name} to return an ImageDataset, got {type(dataset).__name__}")
    return dataset
