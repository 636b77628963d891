"""A data set from its *spec*:

* ``DIR``: the ImageFolder layout, ``class/file.png``;
* ``mnist:ROOT``, ``fashion-mnist:ROOT``, ``ambiguous-mnist:ROOT``, ``dirty-mnist:ROOT``, ``cifar10:ROOT``:
  a named data set whose files are below ``ROOT`` (:mod:`psc_core.data.builtin`);
* ``package.module:factory``: a function ``factory(split=…, preprocess=…) -> ImageDataset``.

``#train``, ``#val`` or ``#test`` after a spec overrides the split that the caller asks for.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from psc_core.data.builtin import BUILT_IN
from psc_core.data.dataset import ImageDataset
from psc_core.data.folder import image_folder
from psc_core.errors import DataError
from psc_core.images.preprocess import Preprocess

SPLITS = ("train", "val", "test")


def open_dataset(spec: str, *, split: str, preprocess: Preprocess, labelled_images: bool = True) -> ImageDataset:
    """Open the data set that ``spec`` names (see the module docstring).

    Args:
        spec: Directory, name with root, or factory; an optional ``#split`` overrides ``split``.
        split: ``"train"``, ``"val"`` or ``"test"``.  A directory is the same for every split, but only for
            ``"train"`` must each of its class folders hold images.
        preprocess: How the images are read.
        labelled_images: When false, all images below a directory are one class (out-of-distribution sets).

    Raises:
        DataError: The spec, the directory or its layout is invalid.

    Example:
        >>> from psc_core import PRESETS, open_dataset
        >>> test = open_dataset("mnist:tests/data", split="test", preprocess=PRESETS["mnist"])
        >>> len(test), len(test.classes)
        (800, 10)
    """
    body, mark, chosen = spec.rpartition("#")
    if not mark or Path(spec).is_dir():
        body, chosen = spec, ""
    split = chosen or split
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got {split!r} in {spec!r}")
    kind, separator, rest = body.partition(":")
    if separator and kind in BUILT_IN:
        return BUILT_IN[kind](Path(rest), split, preprocess)
    if separator and "/" not in kind and not Path(body).exists():
        return _from_factory(kind, rest, split, preprocess)
    return image_folder(Path(body), preprocess, labelled_images=labelled_images, empty_classes=split != "train")


def _from_factory(module: str, name: str, split: str, preprocess: Preprocess) -> ImageDataset:
    if not module or module.startswith("."):
        raise DataError(f"expected package.module:factory, not a path, got {module}:{name}")
    try:
        factory = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"expected a directory, one of {', '.join(f'{k}:ROOT' for k in BUILT_IN)}, or "
            f"package.module:factory; {module}:{name} cannot be imported ({error})"
        ) from error
    dataset = factory(split=split, preprocess=preprocess)
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"expected {module}:{name} to return an ImageDataset, got {type(dataset).__name__}")
    return dataset
