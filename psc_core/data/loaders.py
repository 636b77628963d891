"""Open what a training loop has: a DataLoader, a data set of (image, label), or any iterable of batches.

Everything is read once into a scratch file, and the passes of a fit read that file, so the order, shuffling, workers
and collate function of a loader do not matter.  Floating-point images are the network's inputs and are kept unchanged
(float32); ``uint8`` tensors, Pillow images, arrays and files are read through a :class:`Preprocess`, as in a service.

A batch, or a single example of a data set, is a tuple or list that begins with images and labels, or a mapping with one
of :data:`IMAGE_KEYS` and one of :data:`LABEL_KEYS`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Subset

from psc_core.data.classes import SHOWN_CLASSES
from psc_core.data.dataset import ImageDataset, check_labels, labelled
from psc_core.data.loader_warnings import (
    dataset_of,
    length_of,
    warn_of_dropped,
    warn_of_files,
    warn_of_random,
    warn_of_range,
)
from psc_core.data.scratch import scratch_file
from psc_core.data.sources import TensorSource
from psc_core.data.targets import measured
from psc_core.errors import DataError, UsageError, listed
from psc_core.images.inputs import check_known, described, read_image
from psc_core.images.loader_description import LoaderDescription
from psc_core.images.loader_preprocessing import Statistic
from psc_core.images.preprocess import Preprocess
from psc_core.names import composed

IMAGE_KEYS: Final = ("pixel_values", "image", "images", "img", "x")
"""The keys under which a mapping may hold images; the first key present counts."""

LABEL_KEYS: Final = ("labels", "label", "targets", "target", "y")
"""The keys under which a mapping may hold labels; the first key present counts."""

MAX_NUMBERED: Final = 1 << 16
"""Maximum number of classes without names."""

JOINED: Final = 1024
"""Number of label tensors that are joined at a time, so that the labels of single examples take little memory."""


def open_loader(  # noqa: PLR0913
    data: Any,
    *,
    preprocess: Any = None,
    mean: Statistic | None = None,
    std: Statistic | None = None,
    classes: Sequence[str] | Mapping[Any, Any] | None = None,
    target: str | None = None,
    unit: str = "",
    name: str = "images",
) -> ImageDataset:
    """Read a loader once and open its images as a data set.

    Args:
        data: A DataLoader, a data set of (image, label), or any iterable of batches.  A training loader should neither
            drop images nor augment them at random; :class:`psc_core.errors.LoaderWarning` reports both.
        preprocess: How files become inputs; required if the images are not float inputs.
        mean: The mean of each channel on the [0, 1] scale that the loader's transform subtracts; with ``std`` it stands
            for a ``preprocess`` that resizes files to the size of the inputs.
        std: The standard deviation of each channel that the loader's transform divides by.
        classes: Class names in the order of the labels, or a mapping such as ``class_to_idx`` or ``id2label``; None for
            those of the data set (torchvision's ``classes``, Hugging Face's ``ClassLabel``), or "0", "1", … up to the
            largest label.  Where the data set has the same names, its labels go by them.
        target: Name of the number that each image has instead of a class, for a regression.
        unit: Unit of that number.
        name: Name of the data set in messages and reports.

    Raises:
        UsageError: If ``data`` is not a loader, does not fit on the disk, needs a ``preprocess`` or has another size;
            or if arguments contradict each other, or one has no effect.
        DataError: If a batch lacks images or labels, has another shape than the others, or labels out of range.

    Example:
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> pairs = TensorDataset(torch.rand(100, 3, 8, 8), torch.arange(100) % 4)
        >>> data = open_loader(DataLoader(pairs, batch_size=32, shuffle=True), mean=(0.0,) * 3, std=(1.0,) * 3)
        >>> len(data), data.classes, next(data.batches(2)).images.dtype
        (100, ('0', '1', '2', '3'), torch.float32)
    """
    if unit and target is None:
        raise UsageError(f"expected a target beside unit={unit!r}, the name of the number that has it; give target too")
    if target is not None and classes is not None:
        raise UsageError("expected classes or a target, got both; images of a regression have no classes")
    said = LoaderDescription.of(preprocess, mean, std, classes=classes, target=target, unit=unit)
    return read_loader(data, name, said)


@dataclass(frozen=True)
class Spooled:
    """The images of n examples in a scratch file, and their labels."""

    images: npt.NDArray[Any]  # (n, channels, height, width), float32 inputs or uint8 pixels
    labels: Tensor  # (n,) or (n, labels of an image)
    low: tuple[float, ...]  # smallest value of each channel
    high: tuple[float, ...]


def read_loader(data: Any, name: str, description: LoaderDescription) -> ImageDataset:
    """Return the images of a loader as a classification data set, or as a regression one if there is a target."""
    preprocessing, classes, target = description.preprocessing, description.classes, description.target
    check_loader(data, name)
    own = _own_names(data)
    if classes is not None:
        _check_names(own, classes, name)
    is_random = warn_of_random(data, name)
    names_all = classes is not None and target is None and not {*own} & {*classes}
    spooled = spool(data, name, preprocessing.preprocess, len(classes or ()) if names_all else None)
    warn_of_dropped(data, name, len(spooled.images))
    preprocess = preprocessing.preprocess_of(spooled.images.shape[1:], spooled.low, spooled.high)
    if spooled.images.dtype == np.float32 and preprocess.is_known:
        warn_of_range(name, preprocess, spooled.low, spooled.high)
    if preprocess.is_known and not is_random:
        warn_of_files(data, name, preprocess)
    source = TensorSource(spooled.images)
    if target is not None:
        return measured(name, target, source, _numbers(spooled.labels, name), preprocess)
    labels = _class_indices(spooled.labels, name, None if classes is None else len(classes))
    if classes is not None:
        labels = _by_names(labels, own, classes)
    last = int(labels.max())
    names = tuple(classes) if classes is not None else own if len(own) == last + 1 else _numbered(last, name)
    return labelled(name, names, source, labels, preprocess)


def spool(data: Any, name: str, preprocess: Preprocess | None, classes: int | None = None) -> Spooled:
    """Read all batches into a nameless scratch file, or those up to a label that is none of this many ``classes``.

    Raises:
        UsageError: If ``data`` is not a loader, does not fit on the disk, or has pixels and no ``preprocess`` is given.
        DataError: If a batch cannot be used.
    """
    labels: list[Tensor] = []
    low, high, span = np.array(np.inf), np.array(-np.inf), list[int]()
    with scratch_file(name) as scratch:
        for number, element in enumerate(elements(data, name)):
            images, of_images = batch_of(element, f"{name}, batch {number}", preprocess)
            if number == 0:
                scratch.check_room(
                    images.nbytes * (length_of(data) or 0), images.dtype
                )  # before hours are spent on reading
            if classes is not None and not of_images.is_floating_point():
                span = [*span, int(of_images.min()), int(of_images.max())]
                span = [min(span), max(span)]
                check_labels(name, span[0], span[1], classes)
            scratch.append(images)
            low = np.minimum(low, images.min(axis=(0, 2, 3)))
            high = np.maximum(high, images.max(axis=(0, 2, 3)))
            labels.append(of_images)
            if len(labels) == JOINED:
                labels = [_joined(labels, name)]
        images = scratch.images()
    return Spooled(images, _joined(labels, name), tuple(map(float, low)), tuple(map(float, high)))


def check_loader(data: Any, name: str) -> None:
    """Raise :class:`UsageError` if ``data`` is neither a loader nor a data set, with what to give instead."""
    if isinstance(data, str | Path):
        instead = "; open the folder with open_dataset(folder, split=…, preprocess=…)"
    elif hasattr(data, "iterrows"):
        instead = "; give its rows as pairs, list(zip(frame[…], frame[…])), of paths and class indices or numbers"
    elif isinstance(data, Tensor | np.ndarray | bytes | Mapping) or not (
        hasattr(data, "__iter__") or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        instead = ""
    else:
        return
    raise UsageError(
        f"expected a DataLoader, a data set of (image, label) or an iterable of batches for {name}, got "
        f"{described(data)}{instead}"
    )


def elements(data: Any, name: str) -> Iterator[Any]:
    """Yield the batches of a loader or the single examples of a data set."""
    if hasattr(data, "__iter__"):
        return iter(data)
    return (data[index] for index in range(len(data)))  # many data sets never raise IndexError


def batch_of(element: Any, where: str, preprocess: Preprocess | None) -> tuple[npt.NDArray[Any], Tensor]:
    """Return the images (n, channels, height, width) and labels (n, …) of a batch, or of a single example.

    Raises:
        UsageError: If it has pixels and no ``preprocess`` is given.
        DataError: If it lacks images or labels, or their numbers differ.
    """
    images, labels = _pair(element, where)
    if isinstance(images, Image.Image | bytes | str | Path) or getattr(images, "ndim", None) in (2, 3):
        images, labels = [images], [labels]
    pixels = _images_of(images, where, preprocess)
    found = _tensor_of(labels, where)
    if len(found) != len(pixels):
        raise DataError(f"{where}: expected a label for each of {len(pixels)} images, got {len(found)}")
    return pixels, found


def _pair(element: Any, where: str) -> tuple[Any, Any]:
    if isinstance(element, Mapping):
        found = [next((key for key in keys if key in element), None) for keys in (IMAGE_KEYS, LABEL_KEYS)]
        if None not in found:
            return element[found[0]], element[found[1]]
        raise DataError(
            f"{where}: expected one of {', '.join(IMAGE_KEYS)} and one of {', '.join(LABEL_KEYS)} in a mapping, got "
            f"{', '.join(map(str, element))}; let the collate function return (images, labels)"
        )
    if isinstance(element, tuple | list) and len(element) >= 2:
        return element[0], element[1]
    raise DataError(f"{where}: expected (images, labels), got {described(element)}; put a single batch into a list")


def _images_of(images: Any, where: str, preprocess: Preprocess | None) -> npt.NDArray[Any]:
    """Return floats unchanged, and pixels, pictures and files read through ``preprocess``."""
    if isinstance(images, list | tuple) and images and all(map(_is_float, images)):
        if len({tuple(each.shape) for each in images}) > 1:
            raise DataError(f"{where}: expected inputs of one shape; resize them in the transform")
        images = torch.stack([torch.as_tensor(each) for each in images])
    if isinstance(images, np.ndarray) and _is_float(images):
        images = torch.from_numpy(images)
    if isinstance(images, Tensor) and images.is_floating_point():
        return _inputs_of(images, where)
    if preprocess is None:
        raise UsageError(
            f"{where}: images that are not float inputs ({described(next(iter(images), images))}) need preprocess=…, "
            "which says how they become inputs"
        )
    return np.stack([_read(image, preprocess) for image in images])


def _is_float(image: Any) -> bool:
    if isinstance(image, np.ndarray):
        return bool(np.issubdtype(image.dtype, np.floating))
    return isinstance(image, Tensor) and image.is_floating_point()


def _inputs_of(images: Tensor, where: str) -> npt.NDArray[np.float32]:
    if images.ndim != 4 or 0 in images.shape or images.shape[1] not in (1, 3):
        raise DataError(
            f"{where}: expected inputs (n, 1 or 3 channels, height, width), got {tuple(images.shape)}; a batch of grey "
            "images needs an axis for the channel, images[:, None]"
        )
    inputs: npt.NDArray[np.float32] = np.ascontiguousarray(images.detach().float().cpu().numpy())
    if not np.isfinite(inputs).all():
        raise DataError(f"{where}: expected finite inputs, got some that are NaN or infinite; leave these images out")
    return inputs


def _read(image: Any, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
    if isinstance(image, Tensor) and image.dtype == torch.uint8 and image.ndim == 3:
        pixels: npt.NDArray[np.uint8] = image.cpu().numpy()
        if pixels.shape == preprocess.shape:
            check_known(preprocess)
            return pixels
        image = np.ascontiguousarray(pixels.transpose(1, 2, 0))
        image = image[:, :, 0] if image.shape[2] == 1 else image
    return read_image(image, preprocess)


def _tensor_of(labels: Any, where: str) -> Tensor:
    """Return the labels of n images as a tensor on the CPU, (n,) or (n, r)."""
    try:
        parts = [torch.as_tensor(each) for each in labels] if isinstance(labels, list | tuple) else None
        found = torch.as_tensor(labels) if parts is None else torch.stack(parts)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"{where}: expected labels that are numbers, got {labels!r:.80}; give the index of each in classes=[…]"
        ) from error
    found = found.detach().cpu()
    return found[:, 0] if found.ndim == 2 and found.shape[1] == 1 else found


def _joined(labels: list[Tensor], name: str) -> Tensor:
    shapes = {tuple(each.shape[1:]) for each in labels}
    if len(shapes) > 1:
        raise DataError(
            f"{name}: expected the same number of labels for each image, got batches of {sorted(shapes)} labels"
        )
    return torch.cat(labels)


def _numbers(labels: Tensor, name: str) -> Tensor:
    if labels.ndim != 1:
        raise DataError(f"{name}: expected one number for each image, got labels of shape (n, {labels.shape[1]})")
    return labels.double()


def _class_indices(labels: Tensor, name: str, classes: int | None) -> Tensor:
    """Check class indices, (n,), or (n, r) if an image may belong to several classes."""
    if labels.is_floating_point() or labels.is_complex():
        instead = (
            "give labels.argmax(1) of one-hot ones"
            if labels.ndim == 2
            else "class indices are whole numbers, and for numbers there is PSCRegressor.fit"
        )
        raise DataError(f"{name}: expected class indices, got labels of {labels.dtype}; {instead}")
    labels = labels.long()
    if labels.ndim > 2:
        raise DataError(f"{name}: expected one label for each image, got labels of shape {tuple(labels.shape)}")
    if labels.ndim == 2:
        is_flag = int(labels.min()) >= 0 and int(labels.max()) <= 1
        if is_flag and (bool((labels.sum(1) == 1).all()) or (labels.shape[1] == classes and labels.shape[1] > 2)):
            raise DataError(
                f"{name}: expected class indices, got what looks like one-hot labels of shape (n, {labels.shape[1]}); "
                "give labels.argmax(1)"
            )
    return labels


def _own_names(data: Any) -> tuple[str, ...]:
    """Return the class names of a data set of torchvision or Hugging Face; none where its labels may not mean them."""
    dataset = dataset_of(data)
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    features = getattr(dataset, "features", None)
    of_labels = [features[key] for key in LABEL_KEYS if key in features] if isinstance(features, Mapping) else []
    names = getattr(of_labels[0], "names", None) if of_labels else getattr(dataset, "classes", None)
    changed = getattr(dataset, "target_transform", None) is not None
    if changed or not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        return ()
    names = tuple(map(composed, names))
    return names if len({*names}) == len(names) else ()


def _check_names(own: Sequence[str], classes: Sequence[str], name: str) -> None:
    """Require that a data set with a class of its own gives no other class another label.

    Raises:
        DataError: If it does.  Where no name has another label, its own may be other words for the same classes.
    """
    unknown = next((each for each in own if each not in classes), None)
    for label, each in enumerate(own if unknown is not None else ()):
        if each in classes and classes.index(each) != label:
            raise DataError(
                f"{name}: expected label {classes.index(each)} for class {each!r}, its data set gives {label} and has "
                f"a class {unknown!r}, which is none of {listed(classes, SHOWN_CLASSES)}; leave its images out, or "
                "name it as the others do"
            )


def _by_names(labels: Tensor, own: Sequence[str], classes: Sequence[str]) -> Tensor:
    """Return a data set's labels as indices into ``classes``, which it may name in another order or lack in part."""
    is_named = {*own} <= {*classes} and 0 <= int(labels.min()) <= int(labels.max()) < len(own)
    return torch.tensor([classes.index(each) for each in own])[labels] if is_named else labels


def _numbered(last: int, name: str) -> tuple[str, ...]:
    """Return "0" … "last" as class names."""
    if last >= MAX_NUMBERED:
        raise DataError(
            f"{name}: expected class indices, got {last}; number the classes from 0, or name them, classes=[…]"
        )
    return tuple(map(str, range(last + 1)))
