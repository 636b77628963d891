"""Open a data set by its *spec*, and match its classes to a network's outputs by name.

* ``DIR``: the ImageFolder layout, ``class/file.png``;
* ``FILE.csv``, ``FILE.tsv`` or ``FILE.parquet``: a table of image files and their classes, or their numbers;
* ``mnist:ROOT``, ``fashion-mnist:ROOT``, ``ambiguous-mnist:ROOT``, ``dirty-mnist:ROOT``, ``cifar10:ROOT``,
  ``rotated-mnist:ROOT``: a named data set whose files, IDX or a tar archive of JPEGs, are below ``ROOT``; the
  validation split consists of training images at fixed positions;
* ``package.module:factory``: a function ``factory(split=…, preprocess=…) -> ImageDataset``.

``#train``, ``#val`` or ``#test`` after a spec overrides the split that the caller asks for.

In a table with a header the column :data:`FILE_COLUMN`, or the first one where none has this name, holds paths,
absolute or relative to the table's folder.  Another column holds a class name, a class index or a number for each
image.

Folder names come in alphabetical order, a network's outputs in the order of its training.  Case, spaces, underscores,
hyphens and characters without a width are ignored, unless two classes on the same side differ in nothing else.
"""

from __future__ import annotations

import gzip
import math
import os
import re
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from unicodedata import normalize

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

from psc_core.answers import Target
from psc_core.data.dataset import (
    ArraySource,
    EncodedSource,
    FileSource,
    ImageDataset,
    concatenate,
    held_out,
    label_images,
    number_images,
)
from psc_core.errors import DataError, UsageError, import_from, join_names, shorten
from psc_core.images import SUFFIXES
from psc_core.images.described import as_preprocess
from psc_core.images.files import files_below, is_hidden, unread_below, unread_beside
from psc_core.images.preprocess import Preprocess
from psc_core.text import check_columns, compose, is_number, number_marks, open_csv, parse_number

SHOWN_CLASSES = 10  # maximum number of class names in an error message


def match(images: Sequence[str], outputs: Sequence[str], name: str) -> tuple[tuple[str, ...], str]:
    """Put class names into the order of the network's outputs, with a note; codes for them keep their order."""
    found = _in_order(images, outputs, compose) or _in_order(images, outputs, _plain)
    if found is not None:
        moved = found != tuple(images)
        return found, "classes are in the order of the network's outputs, by their names" if moved else ""
    if len(images) == len(outputs) and {*map(_plain, images)}.isdisjoint(map(_plain, outputs)):
        return tuple(images), (
            f"no class of {name} has a name of the network's ({join_names(outputs, SHOWN_CLASSES)}); their order is "
            "taken to be that of its outputs"
        )
    raise _other_classes(images, outputs, name, "network's")


def in_network_order(data: ImageDataset, outputs: Sequence[str] | None) -> tuple[ImageDataset, str]:
    """Return the images with their labels in the order of the network's outputs, where both have names, and a note."""
    if not outputs or not data.classes:
        return data, ""
    classes, note = match(data.classes, outputs, data.name)
    return data.in_order(classes), note


def check_same(data: ImageDataset, classes: Sequence[str], whose: str) -> None:
    """Check that a data set has exactly these classes in this order; ``whose`` is such as ``"network's"``."""
    if data.classes != tuple(map(compose, classes)):
        raise _other_classes(data.classes, classes, data.name, whose)


def _other_classes(images: Sequence[str], expected: Sequence[str], name: str, whose: str) -> DataError:
    """Return the error for images with other classes, which lists the names that only one side has."""
    for key in (_plain, compose):
        odd = {"unknown": _without(images, expected, key), "missing": _without(expected, images, key)}
        differences = [f"{what}: {join_names(names, SHOWN_CLASSES)}" for what, names in odd.items() if names]
        if differences:
            break
    in_common = "in another order" if len(images) == len(expected) else "some share a name"
    return DataError(
        f"expected the {whose} {len(expected)} classes in {name}, got {len(images)} "
        f"({'; '.join(differences) or in_common}); use images of the same classes, in folders named alike (among "
        "validation and test images an empty one is enough)"
    )


def _without(names: Sequence[str], others: Sequence[str], key: Callable[[str], str]) -> list[str]:
    known = {*map(key, others)}
    return [name for name in names if key(name) not in known]


def _in_order(images: Sequence[str], outputs: Sequence[str], key: Callable[[str], str]) -> tuple[str, ...] | None:
    """Return the images' names in the network's order; None if the sets of keys differ or two names share a key."""
    by_key = {key(name): name for name in images}
    wanted = [key(name) for name in outputs]
    if len(by_key) != len(images) or sorted(by_key) != sorted(wanted):
        return None
    return tuple(by_key[each] for each in wanted)


def _plain(name: str) -> str:
    shown = "".join(each for each in compose(name) if unicodedata.category(each) != "Cf")
    return compose(re.sub(r"[\s_-]+", " ", shown).casefold())


FILE_COLUMN: Final = "file"  # the name of the column of paths
_MAX_PATH: Final = 4096  # bytes, that of Linux
MAX_DIGITS: Final = 100  # maximum number of digits of a class index; Python itself converts no more than 4,300
_INDEX: Final = re.compile(rf"(-?[0-9]{{1,{MAX_DIGITS}}})([.,]0*)?")

# How numbers are written, by what :func:`psc_core.text.number_marks` returns.
_MARKS: Final = {
    ".": "a decimal point",
    ".,": "commas between groups of digits",
    ",": "a decimal comma",
    "": "a decimal comma in some cells and a decimal point in others",
}

TABLE_SUFFIXES: Final = (".csv", ".tsv", ".parquet")


def open_table(
    path: Path, preprocess: Preprocess, column: str | None, *, labelled_images: bool, numbers: bool | None, unit: str
) -> ImageDataset:
    """Open the images that a table lists, with what a column says of them; see :func:`open_dataset`."""
    columns, delimiter = _read_table(path, "file,label" if labelled_images else "file")
    file_column = next((name for name in columns if name.casefold() == FILE_COLUMN), next(iter(columns)))
    source = _files_of(path, file_column, columns.pop(file_column))
    if not labelled_images:
        stem = path.stem.encode(errors="replace").decode()  # One class may have any name.
        return label_images(str(path), [stem], source, torch.zeros(len(source), dtype=torch.int64), preprocess)
    name = _chosen(path, column, [*columns], file_column)
    entries = [*map(_cell, columns[name])]
    marks = number_marks([entry for entry in entries if isinstance(entry, str)], delimiter)
    if numbers is not False and _are_numbers(path, name, entries, by_request=numbers is True):
        values = _checked_numbers(path, name, entries, marks, by_request=numbers is True)
        data = number_images(str(path), Target.of(name, unit), source, values, preprocess)
        _check_repeated(path, source, name, entries, values.tolist())
        return replace(data, notes=_reading(path, name, entries, marks))
    if unit:
        raise UsageError(f"{path} has classes in {name!r}, which have no unit; leave out the unit {unit!r}")
    are_indices = all(_is_number(entry) for entry in entries)
    labels = _class_names(path, name, entries, marks if are_indices else None)
    _check_repeated(path, source, name, entries, labels)
    # Class indices count in their own order: "10" comes after "9".
    classes = sorted({*labels}, key=(lambda label: (int(label), label)) if are_indices else None)
    position = {label: index for index, label in enumerate(classes)}
    data = label_images(str(path), classes, source, torch.tensor([position[label] for label in labels]), preprocess)
    return replace(data, names_empty_classes=False)


def _chosen(path: Path, name: str | None, others: Sequence[str], file_column: str) -> str:
    shown = f"the columns {', '.join(others) or 'none'} beside that of the files, {file_column!r}"
    if name is None and len(others) != 1:
        raise UsageError(f"{path} has {shown}; choose one with --target")
    chosen = others[0] if name is None else compose(name)
    if chosen not in others:
        raise UsageError(f"{path} has no column {chosen!r}, it has {shown}; choose one with --target")
    return chosen


def _files_of(path: Path, column: str, entries: Sequence[Any]) -> FileSource:
    """Return the files of a table; raise :class:`DataError` if there are none, or none of them exists."""
    if not entries:
        raise DataError(f"{path} has no rows; give one for each image")
    for row, entry in enumerate(entries, 1):
        text = entry if isinstance(entry, bytes) else str(entry or "").encode(errors="surrogateescape")
        if isinstance(entry, dict) or len(text) > _MAX_PATH or b"\0" in text:
            raise DataError(
                f"{path}: row {row} has no path in the column {column!r} but an image or another long value; write the "
                f"images to files, and their paths into a column {FILE_COLUMN!r}"
            )
    given = [os.fsdecode(entry) if isinstance(entry, bytes) else str(entry or "") for entry in entries]
    if empty := next((row for row, name in enumerate(given, 1) if not name.strip()), 0):
        raise DataError(f"{path}: row {empty} has no file in the column {column!r}; give one, or leave the row out")
    names = NamesOnDisk(path.parent)
    source = FileSource(path.parent, np.array([os.fsencode(names.on_disk(name)) for name in given], dtype=np.bytes_))
    if not any(_exists(source.path(index)) for index in range(len(source))):
        raise DataError(
            f"{path}: none of the files in the column {column!r} exists, the first is {source.path(0)}; give paths "
            f"with their suffixes, relative to the table's folder, in the column {FILE_COLUMN!r} or in the first one"
        )
    return source


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # Too long to be a path.
        return False


class NamesOnDisk:
    """The names of the files below a folder, which a table may have in another Unicode form than the disk."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._listed: dict[Path, dict[str, str]] = {}  # of each folder, by their composed form

    def on_disk(self, name: str) -> str:
        """Return a path as the disk has it, or unchanged if it has none."""
        bare = name.strip()
        if (name == bare and name.isascii()) or _exists(self._root / name):  # ASCII is the same in every form.
            return name
        found = Path()
        for part in Path(bare).parts:
            found /= self._of_folder(self._root / found).get(normalize("NFC", part), part)
        return str(found)

    def _of_folder(self, folder: Path) -> dict[str, str]:
        if folder not in self._listed:
            with suppress(OSError):
                self._listed[folder] = {normalize("NFC", each.name): each.name for each in folder.iterdir()}
        return self._listed.setdefault(folder, {})


def _check_repeated(path: Path, source: FileSource, column: str, entries: Sequence[Any], said: Sequence[Any]) -> None:
    first: dict[str, int] = {}
    for row, value in enumerate(said):
        before = first.setdefault(os.path.normpath(source.path(row)), row)
        if said[before] != value:
            raise DataError(
                f"{path}: rows {before + 1} and {row + 1} are of the file {os.fsdecode(source.names[row])}, with "
                f"{column} {entries[before]!r} and {entries[row]!r}; keep one of them"
            )


def _is_number(entry: Any) -> bool:
    return isinstance(entry, int | float | Decimal) or (isinstance(entry, str) and is_number(entry))


def _is_missing(entry: Any) -> bool:
    """Return whether an entry is NaN, which programs write where a value is missing."""
    return entry != entry or (isinstance(entry, str) and entry.lower() == "nan")  # NaN differs from itself.


def _are_numbers(path: Path, column: str, entries: Sequence[Any], *, by_request: bool) -> bool:
    """Return whether a column holds numbers: by request, or if any entry is one, or none is anything else."""
    odd = [entry for entry in entries if not _is_number(entry)]
    percent = [entry for entry in odd if isinstance(entry, str) and entry.endswith("%") and is_number(entry[:-1])]
    if percent and (by_request or percent == odd):
        raise DataError(
            f"{path} has {column} {percent[0]!r}, a number with a sign; write the numbers alone, with the unit apart "
            f"(--unit '%'){'' if by_request else ', or give --task classification if these are classes'}"
        )
    return by_request or not odd or any(_is_number(entry) and not _is_missing(entry) for entry in entries)


def _number(path: Path, column: str, row: int, entry: Any, marks: str) -> float | None:
    try:
        return parse_number(entry, marks) if isinstance(entry, str) else float(entry) if _is_number(entry) else None
    except DataError as error:
        raise DataError(f"{path}: row {row} has {column} {error}") from error


def _checked_numbers(path: Path, column: str, entries: Sequence[Any], marks: str, *, by_request: bool) -> torch.Tensor:
    instead = "" if by_request else ", or give --task classification if these are classes"
    numbers = list[float]()
    for row, entry in enumerate(entries, 1):
        number = _number(path, column, row, entry, marks)
        if number is None:
            raise DataError(f"{path}: row {row} has {column} {entry!r}, expected a number; correct it{instead}")
        if not math.isfinite(number):
            raise DataError(
                f"{path}: row {row} has {column} {entry!r}, expected a finite number; correct it, or leave the "
                "image out"
            )
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)


def _reading(path: Path, column: str, entries: Sequence[Any], marks: str) -> tuple[str, ...]:
    """Return a line that says how numbers were read, where that was found from the column."""
    odd = ",." if marks == "," else ","
    text = next((entry for entry in entries if isinstance(entry, str) and {*odd} & {*entry}), None)
    if text is None:
        return ()
    number = parse_number(text, marks)
    return (f"{path}: numbers of {column!r} are read with {_MARKS[marks]}: {text!r} is {number:.15g}",)


def _class_names(path: Path, column: str, entries: Sequence[Any], marks: str | None) -> list[str]:
    """Return the class name of each row; with ``marks`` all are numbers, so these are class indices, and 3.0 is "3"."""
    names: list[str] = []
    spelled: dict[int, str] = {}
    for row, entry in enumerate(entries, 1):
        if entry is None or entry == "":
            raise DataError(f"{path}: row {row} has no {column}; give its class, or leave the image out")
        if marks is None and _is_missing(entry):
            raise DataError(
                f"{path}: row {row} has {column} {entry!r}, which programs write where a value is missing; give its "
                "class, under another name if it is called so, or leave the image out"
            )
        if not isinstance(entry, str | int | float | Decimal | date):
            raise DataError(f"{path}: row {row} has {column} {shorten(repr(entry))}, expected the name of one class")
        number = None if marks is None else _number(path, column, row, entry, marks)
        name = str(entry) if marks is None else _index(entry, number)
        if name is None:
            advice = (
                "expected a class name or index; numbers are of --task regression"
                if number is not None and math.isfinite(number) and not number.is_integer()
                else f"expected a class index of at most {MAX_DIGITS} digits, as in other rows; give its class, under "
                "another name if it is called so, or leave the image out"
            )
            raise DataError(f"{path}: row {row} has {column} {shorten(repr(entry))}, {advice}")
        if marks is not None and (other := spelled.setdefault(int(name), name)) != name:
            raise DataError(
                f"{path}: row {row} has {column} {name!r}, a row before it {other!r}; write a class one way"
            )
        names.append(name)
    return names


def _index(entry: Any, number: float | None) -> str | None:
    """Return a class index with all its digits, also of 3.0; None if it is another number."""
    if isinstance(entry, str):  # Not by way of a float, which has digits for no number above 2**53.
        found = _INDEX.fullmatch(entry)
        return found[1] if found and float(found[1]) == number else None
    return str(int(entry)) if math.isfinite(entry) and entry == int(entry) else None


def _read_table(path: Path, header: str) -> tuple[dict[str, list[Any]], str]:
    """Read the columns of a table by name; return them and what separates them, empty for a Parquet table."""
    if path.suffix.lower() == ".parquet":
        return _read_parquet(path), ""
    try:
        with open_csv(path) as opened:
            rows = [row for _, row in opened.lines]
    except OSError as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    return _columns_of(path, rows, header), opened.delimiter


def _read_parquet(path: Path) -> dict[str, list[Any]]:
    try:
        from pyarrow import parquet
        from pyarrow.lib import ArrowException
    except ImportError as error:
        raise UsageError(f"{path} needs pyarrow; pip install 'psc[parquet]'") from error
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, ArrowException) as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    names = [compose(name) for name in table.column_names]
    check_columns(path, names)
    return {name: column.to_pylist() for name, column in zip(names, table.columns, strict=True)}


def _columns_of(path: Path, rows: Sequence[Sequence[str]], expected: str) -> dict[str, list[Any]]:
    """Return the columns of a table of text by the names in its first row, without those that are empty altogether."""
    if not rows:
        raise DataError(f"{path} is empty; give a table with a header, as {expected}")
    header, *others = rows
    for number, row in enumerate(others, 1):
        if len(row) != len(header):
            raise DataError(
                f"{path}: row {number} has {len(row)} values, the header {len(header)}; correct the row, with "
                "quotation marks around a value that holds what separates the columns"
            )
    kept = [at for at, name in enumerate(header) if name.strip() or any(row[at].strip() for row in others)]
    names = [compose(header[at]) for at in kept]
    check_columns(path, names)
    if image := next((name for name in names if name.lower().endswith(SUFFIXES)), None):
        raise DataError(f"{path} has no header, its first row holds the file {image}; add the line {expected} above it")
    return {name: [row[at] for row in others] for name, at in zip(names, kept, strict=True)}


def _cell(entry: Any) -> Any:
    """Return a cell without blanks at its ends; what one kind of table holds as it would be in the others."""
    if isinstance(entry, bytes):
        with suppress(UnicodeDecodeError):
            entry = entry.decode()
    if isinstance(entry, bool):
        return str(entry)
    return compose(entry) if isinstance(entry, str) else entry


SEEDS = (0, 1)  # seeds for the angles of rotated-mnist's training and test images
LARGEST_ANGLE = 60.0  # largest rotation of the digits of rotated-mnist in either direction, in degrees
_DIGITS = tuple("0123456789")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")


def read_idx(path: Path, *, ndim: int | None = None) -> npt.NDArray[np.uint8]:
    """Read an IDX file, plain or ``.gz``: two zero bytes, type code, axes, and their lengths as big-endian uint32."""
    packed = path.with_name(path.name + ".gz")
    try:
        data = gzip.decompress(packed.read_bytes()) if packed.exists() else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the IDX file {packed} or {path}: {error}") from error
    if len(data) < 4 or data[:3] != b"\x00\x00\x08":
        raise DataError(f"{path}: expected an IDX header of unsigned bytes, got {data[:4]!r}")
    axes = data[3]
    if not 1 <= axes <= len(data) // 4 - 1:
        raise DataError(f"{path}: expected the length of each of {axes} axes, got {len(data)} bytes")
    shape = tuple(int(n) for n in np.frombuffer(data, ">u4", count=axes, offset=4))
    if (ndim is not None and axes != ndim) or len(data) != 4 + 4 * axes + math.prod(shape):
        raise DataError(
            f"{path}: expected {ndim or axes} axes and {shape} bytes, got {axes} axes and "
            f"{len(data) - 4 - 4 * axes} bytes"
        )
    return np.frombuffer(data, np.uint8, offset=4 + 4 * axes).reshape(shape).copy()


def read_tar(path: Path, prefix: str) -> dict[str, bytes]:
    """Read the files below ``prefix`` in a tar archive into memory, and return their contents by name, sorted."""
    try:
        with tarfile.open(path) as tar:
            members = sorted((m for m in tar if m.isfile() and m.name.startswith(prefix)), key=lambda m: m.name)
            files = {member.name: file.read() for member in members if (file := tar.extractfile(member))}
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(f"cannot read the tar archive {path}: {error}") from error
    if not files:
        raise DataError(f"{path} has no files below {prefix}; give the whole archive")
    return files


def _idx_pair(root: Path, folder: str, split: str) -> tuple[ArraySource, Tensor]:
    stem = root / folder / "raw" / ("t10k" if split == "test" else "train")
    images = read_idx(Path(f"{stem}-images-idx3-ubyte"), ndim=3)
    label_file = f"{stem}-labels-idx{2 if folder == 'AmbiguousMNIST' else 1}-ubyte"
    return ArraySource(images), torch.from_numpy(read_idx(Path(label_file)).astype(np.int64))


def mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    return held_out(label_images("mnist", _DIGITS, *_idx_pair(root, "MNIST", split), preprocess), split, every=12)


def fashion_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    whole = label_images("fashion-mnist", _FASHION, *_idx_pair(root, "FashionMNIST", split), preprocess)
    return held_out(whole, split, every=12)


def ambiguous_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    source, labels = _idx_pair(root, "AmbiguousMNIST", split)
    labels = labels if split == "train" else labels[:, 0]
    return held_out(label_images("ambiguous-mnist", _DIGITS, source, labels, preprocess), split, every=2)


def dirty_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Join MNIST and Ambiguous-MNIST, whose training images have ten labels each, and others one."""
    return concatenate("dirty-mnist", [mnist(root, split, preprocess), ambiguous_mnist(root, split, preprocess)])


def cifar10(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    files = read_tar(root / "cifar10-jpeg.tar.gz", f"cifar10/{'test' if split == 'test' else 'train'}/")
    folders = [name.split("/")[-2] for name in files]
    classes = sorted(set(folders))
    source = EncodedSource(list(files), list(files.values()))
    labels = torch.tensor([classes.index(folder) for folder in folders])
    return held_out(label_images("cifar10", classes, source, labels, preprocess), split, every=10)


def rotated_mnist(root: Path, split: str, preprocess: Preprocess) -> ImageDataset:
    """Rotate each digit by a random angle up to :data:`LARGEST_ANGLE`, its target; the same on every call."""
    source, _ = _idx_pair(root, "MNIST", split)
    generator = torch.Generator().manual_seed(SEEDS[split == "test"])
    angles = (2 * torch.rand(len(source), generator=generator, dtype=torch.float64) - 1) * LARGEST_ANGLE
    turned = [
        np.asarray(Image.fromarray(image).rotate(angle, Image.Resampling.BILINEAR))
        for image, angle in zip(source.images, angles.tolist(), strict=True)
    ]
    target = Target(name="angle", unit="degrees")
    return held_out(
        number_images("rotated-mnist", target, ArraySource(np.stack(turned)), angles, preprocess), split, every=12
    )


BUILT_IN: Mapping[str, Callable[[Path, str, Preprocess], ImageDataset]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "ambiguous-mnist": ambiguous_mnist,
    "dirty-mnist": dirty_mnist,
    "cifar10": cifar10,
    "rotated-mnist": rotated_mnist,
}

SPLITS = ("train", "val", "test")


def open_dataset(
    spec: str | Path,
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
            :func:`psc_core.images.described.as_preprocess` takes.
        labelled_images: If false, all images of a directory or table form one class (out-of-distribution sets).
        numbers: Whether a table holds numbers or, if false, class names or indices; None: numbers are numbers, text is
            classes.
        target: The column of a table that holds the classes or numbers; None if there is only one.
        unit: The unit of the numbers in a table.

    Raises:
        DataError: If the spec, the directory or its layout is invalid.
        UsageError: If a table lacks the target, or ``target`` or ``unit`` is given and ``spec`` names no table.

    Examples:
        >>> from psc_core import PRESETS, open_dataset
        >>> test = open_dataset("mnist:tests/data", split="test", preprocess=PRESETS["mnist"])
        >>> len(test), len(test.classes)
        (800, 10)
    """
    preprocess, spec = as_preprocess(preprocess), str(spec)
    body, chosen = _parted(spec)
    split = chosen or split
    if split not in SPLITS:
        raise DataError(f"expected a split of {', '.join(SPLITS)}, got {split!r} in {spec!r}")
    if is_table(spec):
        path = Path(body)
        return open_table(path, preprocess, target, labelled_images=labelled_images, numbers=numbers, unit=unit)
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
    """Open the images below ``root``; each of its folders that are not hidden is a class, in name order."""
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
    data = label_images(str(root), classes, source, labels, preprocess)
    if [*data.classes] == sorted(data.classes):
        return data
    note = (
        f"{root}: the classes are in the order of the folders' names as the disk has them, which are decomposed (NFD, "
        "as a Mac writes them) or begin with a blank; a network that was trained on composed names has them in another "
        "order: convmv -r -f utf8 -t utf8 --nfc --notest renames the folders"
    )
    return replace(data, notes=(note,))


def unread_files(data: ImageDataset, *, labelled_images: bool = True) -> tuple[str, ...]:
    """Return lines that count the files that are not read of a folder of images; of other data sets none."""
    if (root := folder_of(data)) is None:
        return ()
    return tuple(filter(None, (unread_beside(root) if labelled_images else "", unread_below(root))))


def folder_of(data: ImageDataset) -> Path | None:
    """Return the folder below which every image belongs to a data set; None if it is no folder."""
    is_folder = isinstance(data.source, FileSource) and str(data.source.root) == data.name
    return Path(data.name) if is_folder else None


def _from_factory(module: str, name: str, split: str, preprocess: Preprocess) -> ImageDataset:
    if not module or module.startswith("."):
        raise DataError(f"expected package.module:factory, not a path, got {module}:{name}")
    try:
        factory = import_from(module, name, error=DataError)
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"expected a directory, one of {', '.join(f'{k}:ROOT' for k in BUILT_IN)}, or "
            f"package.module:factory; {module}:{name} cannot be imported ({error})"
        ) from error
    dataset = factory(split=split, preprocess=preprocess)
    if not isinstance(dataset, ImageDataset):
        raise DataError(f"expected {module}:{name} to return an ImageDataset, got {type(dataset).__name__}")
    return dataset
