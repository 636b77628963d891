"""Open what a training loop has: a DataLoader, a data set of (image, label), or any iterable of batches.

Everything is read once into a scratch file, and the passes of a fit read that file, so the order, shuffling, workers
and collate function of a loader do not matter.  A loader that loses images or voids the model's guarantees is warned
of.  Floating-point images are the network's inputs and are kept unchanged (float32); ``uint8`` tensors, Pillow images,
arrays and files are read through a :class:`Preprocess`, as in a service.

A batch, or a single example of a data set, is a tuple or list that begins with images and labels, or a mapping with one
of :data:`IMAGE_KEYS` and one of :data:`LABEL_KEYS`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import IO, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image
from torch import Tensor
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset

from psc_core.answers import UNNAMED, Target
from psc_core.data.cache import HOLD_OUT, Scratch, map_file
from psc_core.data.dataset import ImageDataset, TensorSource, check_labels, label_images, number_images
from psc_core.data.open import SHOWN_CLASSES
from psc_core.errors import DataError, LoaderWarning, PSCError, UsageError, join_names, warn
from psc_core.images import BACKGROUNDS
from psc_core.images.decode import IMAGE_FORMATS
from psc_core.images.described import as_preprocess
from psc_core.images.preprocess import Preprocess, as_batch, check_known, describe_image, mode_of, read_each, read_image
from psc_core.text import class_names, compose

READ_TWICE: Final = 8  # examples that are read twice to see whether they change; a random flip may spare some of them
OTHER: Final = 0.02  # tolerance of the mean difference of input and file, on the [0, 1] scale; other filters make 0.01
MAX_HEADERS: Final = 2000  # files whose headers are read to find their kinds: of one that is not rare, ten on average
RARE: Final = 0.005  # share of the files below which a kind of file changes no rate that anybody would notice
TRIED: Final = 32  # number of files of a kind with alpha among which some are sought whose background shows
SHOWN_KINDS: Final = 5
FEW_INPUTS: Final = 8  # of a tensor, which are looked at for a wrong transform
_ALPHA: Final = "alpha"

_SAME_IMAGES: Final = (
    "give mean and std, or the preprocess, of the loader's transform, let it turn photographs by "
    "PIL.ImageOps.exif_transpose, or write the images that it makes to files and fit on these"
)

_LEVEL_ROUNDING: Final = 1e-3  # tolerance for one of 255 levels, divided by 255 as float32
OUTSIDE: Final = 0.05  # tolerance for inputs darker than black or brighter than white, on the [0, 1] scale


def warn_of_random(data: Any, name: str) -> bool:
    """Warn if an example of the data set differs when it is read again; return whether it does."""
    dataset = dataset_of(data)
    if not hasattr(dataset, "__getitem__") or isinstance(dataset, IterableDataset | list | tuple | Mapping):
        return False
    for index in _spread(dataset):
        if not _same(dataset[index], dataset[index]):
            warn(
                f"{name} changes its images at random, example {index} read twice differs: a model fitted and "
                "calibrated on augmented images does not hold for unaugmented images; give a loader without "
                "augmentation",
                LoaderWarning,
            )
            return True
    return False


def warn_of_files(data: Any, name: str, preprocess: Preprocess) -> None:
    """Warn if a kind of an ``ImageFolder``'s files, read through ``preprocess``, is not what its transform makes."""
    dataset = dataset_of(data)
    paths = _paths_of(dataset)
    kinds = _kinds_of(paths)
    count, found = sum(map(len, kinds.values())), dict[str, tuple[float, float, str]]()
    for kind, indices in kinds.items():
        # A loader may put alpha on another background.
        backgrounds = {*(BACKGROUNDS if _ALPHA in kind else ())} - {preprocess.background}
        others = [replace(preprocess, background=each) for each in reversed(BACKGROUNDS) if each in backgrounds]
        try:
            compared = _compare(dataset, paths, indices, [preprocess, *others])
        except PSCError as error:
            warn(
                f"files of {name} that the loader reads would be refused in a service, {len(indices) / count:.1%} of "
                f"them ({kind}): {error}",
                LoaderWarning,
            )
        else:
            found |= {kind: compared} if compared[0] > OTHER else {}
    for remedy in dict.fromkeys(each[2] for each in found.values()):
        wrong = {kind: each for kind, each in found.items() if each[2] == remedy}
        share = sum(part * len(kinds[kind]) for kind, (_, part, _) in wrong.items()) / count
        which = f" in {share:.1%} of them ({join_names(list(wrong), SHOWN_KINDS)})" if share < 1 else ""
        warn(
            f"files of {name} read as {preprocess} differ from the loader's inputs by "
            f"{max(each[0] for each in wrong.values()):.0%} of white{which}: a service would answer for other images "
            f"than these; {remedy}",
            LoaderWarning,
        )


def warn_of_uncompared(data: Any, images: ImageDataset) -> None:
    """Warn of a loader's inputs that come from files, as far as is known, with which nobody can compare them."""
    dataset, source = dataset_of(data), images.source
    is_input = isinstance(source, TensorSource) and source.images.dtype == np.float32 and images.preprocess.is_known
    if is_input and not _is_in_memory(dataset) and not _paths_of(dataset):
        warn(
            f"the inputs of {images.name} were not compared with files, which its data set does not name: before you "
            "serve, see for some images whether psc.predict(files) answers as psc(inputs) does",
            LoaderWarning,
        )


def _is_in_memory(dataset: Any) -> bool:
    if isinstance(dataset, Subset):
        return _is_in_memory(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(_is_in_memory, dataset.datasets))
    is_array = isinstance(getattr(dataset, "data", None), Tensor | np.ndarray)
    return is_array or isinstance(dataset, TensorDataset | list | tuple | ImageDataset)


def _paths_of(dataset: Any) -> list[str]:
    """Return the file of each example of an ``ImageFolder``, of a part of one or of several; none for others."""
    if isinstance(dataset, Subset):
        paths = _paths_of(dataset.dataset)
        return [paths[index] for index in dataset.indices] if paths else []
    if isinstance(dataset, ConcatDataset):
        parts = [_paths_of(each) for each in dataset.datasets]
        return [path for part in parts for path in part] if all(parts) else []
    samples = getattr(dataset, "samples", None)
    if not isinstance(samples, list):
        return []
    paths = [sample[0] for sample in samples if isinstance(sample, tuple | list) and isinstance(sample[0], str)]
    return paths if len(paths) == len(samples) else []


def _kinds_of(paths: Sequence[str]) -> dict[str, list[int]]:
    """Return the indices of files, of many a random part, by what their header says; rare kinds are left out."""
    count = min(len(paths), MAX_HEADERS)
    kinds: dict[str, list[int]] = {}
    for index in sorted(np.random.default_rng(0).choice(len(paths), count, replace=False).tolist()):
        with suppress(Exception), Image.open(paths[index], formats=IMAGE_FORMATS) as image:
            kinds.setdefault(_kind_of(image), []).append(index)
    return {kind: indices for kind, indices in kinds.items() if len(indices) >= RARE * count}


def _kind_of(image: Image.Image) -> str:
    turned = image.getexif().get(ExifTags.Base.Orientation, 1) if "exif" in image.info else 1
    wide = any(";16" in str(tile.args) for tile in getattr(image, "tile", ())) and ";16" not in image.mode
    parts = [f"{image.format} {image.mode}", "16 bits" * wide, _ALPHA * image.has_transparency_data]
    return ", ".join(filter(None, [*parts, f"EXIF orientation {turned}" * (turned != 1)]))


def _compare(
    dataset: Any, paths: Sequence[str], indices: Sequence[int], ways: list[Preprocess]
) -> tuple[float, float, str]:
    """Return the median difference on the [0, 1] scale, the share of files that it is of, and what to do about it."""
    std = torch.tensor(ways[0].std)[:, None, None]
    found: list[list[float]] = []
    tried, refused = 0, None
    for index in (indices[at] for at in _spread(indices, READ_TWICE if len(ways) == 1 else TRIED)):
        inputs = _loader_inputs(dataset[index], ways[0])
        if inputs is None or len(found) == READ_TWICE:
            break
        try:
            pixels = [way.standardise(as_batch([paths[index]], way)) for way in ways]
        except PSCError as error:
            refused = error
            continue
        tried += 1
        if len(ways) == 1 or not all(torch.equal(pixels[0], each) for each in pixels[1:]):
            found.append([float(((each - inputs) * std).abs().mean()) for each in pixels])
    if refused is not None and not tried:
        raise refused
    if not found:
        return 0.0, 0.0, ""
    differences = [median(of_way) for of_way in zip(*found, strict=True)]
    best = min(range(len(ways)), key=differences.__getitem__)
    if differences[0] > OTHER >= differences[best]:
        remedy = f'give a preprocess with background="{ways[best].background}", as the loader reads alpha'
        return differences[0], len(found) / tried, remedy
    return differences[0], len(found) / tried, _SAME_IMAGES


def _loader_inputs(example: Any, preprocess: Preprocess) -> Tensor | None:
    """Return the image of an example of a data set as a batch of one input; None if it has another form."""
    image = example[0] if isinstance(example, tuple | list) and example else None
    if isinstance(image, Tensor) and image.shape == preprocess.shape:
        return preprocess.standardise(image[None])
    return preprocess.standardise(as_batch([image], preprocess)) if isinstance(image, Image.Image) else None


def _spread(dataset: Any, few: int = READ_TWICE) -> list[int]:
    count = length_of(dataset) or 0
    return sorted({at * count // few for at in range(few)} if count else ())


def warn_of_dropped(data: Any, name: str, count: int) -> None:
    """Warn if a loader with ``drop_last`` left out images; it returned ``count``."""
    drops = any(getattr(each, "drop_last", False) for each in (data, getattr(data, "batch_sampler", None)))
    expected = length_of(data.sampler) if isinstance(data, DataLoader) else None
    if drops and (expected is None or count < expected):
        left = "images" if expected is None else f"{expected - count} images"
        warn(f"the loader of {name} drops {left} of its last batch; give one with drop_last=False", LoaderWarning)


def warn_of_range(
    name: str, preprocess: Preprocess, inputs: Tensor, low: Sequence[float], high: Sequence[float]
) -> bool:
    """Warn about inputs that no pixel value becomes, or ``inputs`` that are pixels / 255; return whether it did.

    Their transform must have been another one.
    """
    darkest, brightest = (
        [value * std + mean for value, mean, std in zip(ends, preprocess.mean, preprocess.std, strict=True)]
        for ends in (low, high)
    )
    mean, std = (torch.tensor(each, device=inputs.device)[:, None, None] for each in (preprocess.mean, preprocess.std))
    if min(darkest) < -OUTSIDE or max(brightest) > 1 + OUTSIDE:
        found = f"would be pixels from {min(darkest):.3g} to {max(brightest):.3g} on the scale from 0 to 1"
    elif 0 <= min(low) < max(high) <= 1 and _are_levels(inputs) and not _are_levels(inputs * std + mean):
        found = "are pixels divided by 255 and not standardised"
    else:
        return False
    warn(
        f"inputs of {name} from {min(low):.3g} to {max(high):.3g} {found}; give the mean and std of the loader's "
        "transform, and inputs that it made",
        LoaderWarning,
    )
    return True


def _are_levels(pixels: Tensor) -> bool:
    """Return whether pixels on the scale from 0 to 1 are of 8 bits."""
    return bool((255 * pixels - (255 * pixels).round()).abs().max() < _LEVEL_ROUNDING)


def check_apart(train: Any, val: Any) -> None:
    """Raise :class:`UsageError` if both loaders give all examples of one data set, even one that changes them."""
    if dataset_of(train) is dataset_of(val) and _is_whole(train) and _is_whole(val):
        raise UsageError(
            f"expected validation images that the network was not trained on, got one data set for both; {HOLD_OUT}"
        )


def dataset_of(data: Any) -> Any:
    """Return the data set behind a DataLoader; any other object is its own data set."""
    return data.dataset if isinstance(data, DataLoader) else data


def _is_whole(data: Any) -> bool:
    return not isinstance(data, DataLoader) or length_of(data.sampler) == length_of(data.dataset)


def length_of(data: Any) -> int | None:
    with suppress(TypeError, NotImplementedError):
        return len(data)
    return None


def _same(one: Any, other: Any) -> bool:
    """Return whether two readings of an example agree in the parts that augmentation changes."""
    match one:
        case Tensor():
            return torch.equal(one, other)
        case np.ndarray():
            return np.array_equal(one, other)
        case Image.Image():
            return bool(one.tobytes() == other.tobytes())
        case Mapping():
            return all(_same(one[key], other[key]) for key in one)
        case list() | tuple():
            return all(map(_same, one, other))
        case _:
            return True


Statistic = float | Sequence[float] | Tensor | npt.NDArray[Any]  # of each channel, or of all


@dataclass(frozen=True)
class ObservedPreprocess(Preprocess):
    """A stand-in for an unknown preprocessing, for pictures: the range of the inputs is taken for 0 … 255."""

    is_known: ClassVar[bool] = False

    @classmethod
    def of_range(cls, shape: tuple[int, int, int], low: Sequence[float], high: Sequence[float]) -> ObservedPreprocess:
        """Return the stand-in for inputs of ``shape`` from ``low`` to ``high`` in each channel."""
        channels, height, width = shape
        std = tuple(1 / (top - bottom) if top > bottom else 1.0 for bottom, top in zip(low, high, strict=True))
        mean = tuple(-bottom * scale for bottom, scale in zip(low, std, strict=True))
        return cls(mode_of(channels), height, width, None, mean, std)

    def __str__(self) -> str:
        return f"{self.mode}, {self.height} × {self.width} inputs from a loader; preprocessing of files unknown"


@dataclass(frozen=True)
class LoaderDescription:
    """What a caller says of a loader's images, and of what their labels mean; None where nothing is known."""

    preprocess: Preprocess | None = None
    mean: Statistic | None = None  # of the transform, in place of a preprocess
    std: Statistic | None = None
    classes: Sequence[str] | None = None  # class names; None: numbered by the labels
    target: Target | None = None  # of a regression, whose labels are numbers; None: classes

    def __post_init__(self) -> None:
        if (self.mean is None) != (self.std is None):
            raise UsageError("expected both mean and std of the transform, got only one; give the other too")
        if self.preprocess is not None and self.mean is not None:
            raise UsageError("expected a preprocess, or mean and std, got both; a preprocess has its own")

    @classmethod
    def of(
        cls,
        preprocess: Any,
        mean: Statistic | None,
        std: Statistic | None,
        *,
        classes: Any = None,
        target: str | None = None,
        unit: str = "",
    ) -> LoaderDescription:
        """Return what the arguments of a public function say, before any image is read."""
        names = None if classes is None else class_names(classes)
        number = None if target is None else Target.of(target, unit)
        return cls(None if preprocess is None else as_preprocess(preprocess), mean, std, names, number)

    def preprocess_of(self, shape: tuple[int, ...], low: Sequence[float], high: Sequence[float]) -> Preprocess:
        """Return the preprocess for inputs of ``shape`` (channels, height, width), from ``low`` to ``high``."""
        channels, height, width = shape
        if self.preprocess is not None:
            if self.preprocess.shape != shape:
                raise UsageError(
                    f"expected inputs of the preprocess's shape {self.preprocess.shape}, got {shape}; give the "
                    "preprocess of your transform"
                )
            return self.preprocess
        if self.mean is None or self.std is None:
            return ObservedPreprocess.of_range((channels, height, width), low, high)
        return Preprocess(mode_of(channels), height, width, None, _each(self.mean, channels), _each(self.std, channels))

    def given(self) -> tuple[str, ...]:
        said = [name for name in ("preprocess", "mean", "std", "classes") if getattr(self, name) is not None]
        target = UNNAMED if self.target is None else self.target
        return (*said, *["target"] * (target.name != UNNAMED.name), *["unit"] * bool(target.unit))


def _each(statistic: Statistic, channels: int) -> tuple[float, ...]:
    """Return the statistic of each channel; a single number applies to all channels."""
    each: tuple[float, ...] = tuple(torch.as_tensor(statistic, dtype=torch.float64).reshape(-1).tolist())
    return each * channels if len(each) == 1 else each


def temporary_folder() -> str:
    """Return the folder of scratch files; raise :class:`UsageError` if there is none that may be written to."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError as error:
        raise UsageError(f"a fit needs a folder for temporary files: {error.strerror}; set TMPDIR to one") from error


ELSEWHERE: Final = "set TMPDIR to a folder of a larger disk"  # the remedy for a full disk
IMAGE_KEYS: Final = ("pixel_values", "image", "images", "img", "x")  # of a mapping; the first key present counts
LABEL_KEYS: Final = ("labels", "label", "targets", "target", "y")  # of a mapping; the first key present counts
MAX_NUMBERED: Final = 1 << 16  # maximum number of classes without names
JOINED: Final = 1024  # label tensors that are joined at once, so that the labels of single examples take little memory


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

    Examples:
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


def read_loader(data: Any, name: str, description: LoaderDescription) -> ImageDataset:
    """Return the images of a loader as a classification data set, or as a regression one if there is a target."""
    classes, target = description.classes, description.target
    check_loader(data, name)
    own = _own_names(data, name) if target is None else ()
    if classes is not None:
        _check_names(own, classes, name)
    is_random = warn_of_random(data, name)
    names_all = classes is not None and target is None and not {*own} & {*classes}
    images, labels, low, high = spool(data, name, description.preprocess, len(classes or ()) if names_all else None)
    warn_of_dropped(data, name, len(images))
    preprocess = description.preprocess_of(images.shape[1:], low, high)
    if images.dtype == np.float32 and preprocess.is_known:
        warn_of_range(name, preprocess, torch.tensor(images[:FEW_INPUTS]), low, high)
    if preprocess.is_known and not is_random:
        warn_of_files(data, name, preprocess)
    source = TensorSource(images)
    if target is not None:
        if labels.ndim != 1:
            raise DataError(f"{name}: expected one number for each image, got labels of shape (n, {labels.shape[1]})")
        return number_images(name, target, source, labels.double(), preprocess)
    labels = _class_indices(labels, name, None if classes is None else len(classes))
    is_named = {*own} <= {*(classes or ())} and 0 <= int(labels.min()) <= int(labels.max()) < len(own)
    if classes is not None and is_named:  # The data set may name them in another order, or lack some.
        labels = torch.tensor([classes.index(each) for each in own])[labels]
    last = int(labels.max())
    names = tuple(classes) if classes is not None else own if len(own) == last + 1 else _numbered(last, name)
    return label_images(name, names, source, labels, preprocess)


def spool(
    data: Any, name: str, preprocess: Preprocess | None, classes: int | None = None
) -> tuple[npt.NDArray[Any], Tensor, list[float], list[float]]:
    """Read all batches into a scratch file; return images, labels, and the least and largest value of each channel."""
    labels: list[Tensor] = []
    first: npt.NDArray[Any] | None = None  # an empty array with the images' shape and dtype
    low, high, span = np.array(np.inf), np.array(-np.inf), list[int]()
    temporary_folder()
    with Scratch().open() as file:
        room = Scratch().room()
        # Many data sets never raise IndexError.
        elements = data if hasattr(data, "__iter__") else (data[index] for index in range(len(data)))
        for number, element in enumerate(elements):
            images, of_images = batch_of(element, f"{name}, batch {number}", preprocess)
            first = images[:0] if first is None else first
            if images.shape[1:] != first.shape[1:] or images.dtype != first.dtype:
                raise DataError(
                    f"{name}: expected images of one shape and type, batch {number} has {images.dtype} "
                    f"{images.shape[1:]}, those before {first.dtype} {first.shape[1:]}; resize them in the transform, "
                    "or give a preprocess"
                )
            if classes is not None and not of_images.is_floating_point():
                span = [*span, int(of_images.min()), int(of_images.max())]
                span = [min(span), max(span)]
                check_labels(name, span[0], span[1], classes)
            # Of the first batch with that of all, before hours are spent on reading.
            size = file.tell() + images.nbytes * max(1, (length_of(data) or 0) * (number == 0))
            if size > room:
                smaller = (
                    "" if images.dtype == np.uint8 else ", or uint8 images with preprocess=…, which take a quarter"
                )
                raise UsageError(
                    f"{name} takes {size / 2**30:.3g} GiB on the disk while a fit runs, of {tempfile.gettempdir()} "
                    f"{room / 2**30:.3g} GiB may be used; {ELSEWHERE}, give fewer images (torch.utils.data.Subset)"
                    f"{smaller}"
                )
            _append(name, file, images)
            low = np.minimum(low, images.min(axis=(0, 2, 3)))
            high = np.maximum(high, images.max(axis=(0, 2, 3)))
            labels.append(of_images)
            if len(labels) == JOINED:
                labels = [_joined(labels, name)]
        if first is None:
            raise DataError(f"{name} gave no images; an iterator gives them only once, so give the loader itself")
        joined = _joined(labels, name)
        kept = map_file(file, (len(joined), *first.shape[1:]), first.dtype)
    return kept, joined, low.tolist(), high.tolist()


def _append(name: str, file: IO[bytes], images: npt.NDArray[Any]) -> None:
    left = memoryview(images.tobytes())
    try:
        while left:
            left = left[file.write(left) :]
    except OSError as error:
        raise UsageError(f"cannot store {name} in {tempfile.gettempdir()}: {error.strerror}; {ELSEWHERE}") from error


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
        f"{describe_image(data)}{instead}"
    )


def batch_of(element: Any, where: str, preprocess: Preprocess | None) -> tuple[npt.NDArray[Any], Tensor]:
    """Return the images (n, channels, height, width) and labels (n, …) of a batch, or of a single example."""
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
    raise DataError(
        f"{where}: expected (images, labels), got {describe_image(element)}; put a single batch into a list"
    )


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
            f"{where}: images that are not float inputs ({describe_image(next(iter(images), images))}) need "
            "preprocess=…, which says how they become inputs"
        )
    return np.stack(read_each(images, partial(_read, preprocess=preprocess), f"{where}, "))


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


def _own_names(data: Any, name: str) -> tuple[str, ...]:
    """Return the class names of a data set of torchvision or Hugging Face; none where its labels may not mean them."""
    dataset = dataset_of(data)
    if isinstance(dataset, Subset):
        return _own_names(dataset.dataset, name)
    if isinstance(dataset, ConcatDataset):
        parts = [_own_names(each, name) for each in dataset.datasets]
        most = max(parts, key=len)
        for part in parts:
            for label, (one, other) in enumerate(zip(part, most, strict=False)):
                if one != other:
                    raise DataError(
                        f"{name}: expected one class for label {label} in the ConcatDataset, got {one!r} and "
                        f"{other!r}; give its parts the same ones, or each a target_transform to the order of classes"
                    )
        return most if all(parts) else ()
    features = getattr(dataset, "features", None)
    of_labels = [features[key] for key in LABEL_KEYS if key in features] if isinstance(features, Mapping) else []
    names = getattr(of_labels[0], "names", None) if of_labels else getattr(dataset, "classes", None)
    indices = None if of_labels else getattr(dataset, "class_to_idx", None)
    if isinstance(indices, Mapping):  # Labels follow it, in whatever order the classes are listed.
        names = sorted(indices, key=indices.__getitem__) if {*indices.values()} == {*range(len(indices))} else None
    changed = getattr(dataset, "target_transform", None) is not None
    if changed or not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
        return ()
    names = tuple(map(compose, names))
    return names if len({*names}) == len(names) else ()


def _check_names(own: Sequence[str], classes: Sequence[str], name: str) -> None:
    """Require that a data set with a class of its own gives no other class another label."""
    unknown = next((each for each in own if each not in classes), None)
    for label, each in enumerate(own if unknown is not None else ()):
        if each in classes and classes.index(each) != label:
            raise DataError(
                f"{name}: expected label {classes.index(each)} for class {each!r}, its data set gives {label} and has "
                f"a class {unknown!r}, which is none of {join_names(classes, SHOWN_CLASSES)}; leave its images out, or "
                "name it as the others do"
            )


def _numbered(last: int, name: str) -> tuple[str, ...]:
    if last >= MAX_NUMBERED:
        raise DataError(
            f"{name}: expected class indices, got {last}; number the classes from 0, or name them, classes=[…]"
        )
    return tuple(map(str, range(last + 1)))
