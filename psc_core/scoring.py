"""Run a fitted model over many images: over a data set, or for ``psc-score`` over a folder or list, part by part.

An input is a folder (with every image file below it), a Parquet file with a column of paths or encoded images, or a
``.csv``, ``.tsv`` or text file of paths; its order is the same in every process and run, and memory holds the names of
one folder or part at a time.  Part i holds the images [i·n, (i + 1)·n) and becomes one file, ``part-00000.parquet`` and
so on, in the same batches by any process: so an interrupted run can continue, and several processes can share the work.

A file has the columns ``item`` (the image's name), those of the model's task (:meth:`psc_core.tasks.base.Task.columns`)
and ``error``, the reason why an image has no answer.  Either ``error`` or the columns of the task are null.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import chain, compress, islice
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from pydantic import BaseModel
from torch import Tensor

from psc_core.compute import Compute, count_images, track_images
from psc_core.data.dataset import Batch, FileSource, ImageDataset
from psc_core.data.open import TABLE_SUFFIXES, NamesOnDisk, open_table
from psc_core.errors import DataError, ImageError, UsageError, needs
from psc_core.images import SUFFIXES
from psc_core.images.decode import png_of
from psc_core.images.files import files_below, sample_file
from psc_core.images.preprocess import CANNOT_READ, PRESETS, Images, read_image
from psc_core.model import MAX_BATCH, FittedModel
from psc_core.pipeline import NO_MAP
from psc_core.settings import BATCH_IMAGES, COLUMN, TABLE_FORMATS
from psc_core.tasks.base import BasePrediction, Outputs, Task
from psc_core.text import encoding_of, printable

# What the outputs are of; readers of a folder of Parquet files skip names that begin with _.
VERSION_FILE = "_bundle-version"
INPUT_FILE = "_input"
OUT_FILE = "_scores"  # among maps: the folder whose rows they belong to

_NO_TEXT = (b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"\x1f\x8b", b"BZh9", b"%PDF-")  # others have NUL bytes
_BASE64 = ("/9j/", "iVBORw0KGgo", "data:image/")  # which becomes a row that says so


@dataclass(frozen=True)
class NamedImage:
    name: str  # the path, or the row in a Parquet file
    image: str | bytes  # a path, or an encoded image
    source: str = ""  # a line that images of another input do not share; empty if unknown


def in_parts(images: Iterator[NamedImage], size: int) -> Iterator[list[NamedImage]]:
    while part := list(islice(images, size)):
        yield part


def named_images(source: str | Path, column: str | None = None) -> Iterator[NamedImage]:
    """Return the images in a folder, a table or a text file of paths, which are absolute or relative to its folder."""
    source = Path(source)
    if not source.is_dir() and not source.is_file():
        what = "is a pipe; write it to a file and" if source.exists() or source.name == "-" else "does not exist;"
        raise UsageError(f"{source} {what} give a folder, a table or a text file of paths")
    suffix, line = source.suffix.lower() if source.is_file() else "", _identity(source, column)
    if suffix == ".parquet":
        return (NamedImage(*each, line) for each in _parquet(source, column or COLUMN))
    if column:
        raise UsageError(f"only a .parquet file has a choice of columns, not {source}; leave out the column {column!r}")
    if source.is_dir():
        images = (path for path in files_below(source) if path.lower().endswith(SUFFIXES))
        return (NamedImage(printable(os.path.relpath(path, source)), path, line) for path in images)
    paths = _table(source) if suffix in TABLE_SUFFIXES else _list(source)
    return (NamedImage(printable(path), str(source.parent / path), line) for path in paths)


def _identity(source: Path, column: str | None) -> str:
    """Return a line that another input, or a table that was written again, does not share; names are compared too."""
    parts = [printable(source.resolve())]
    if source.is_file() and source.suffix.lower() == ".parquet":
        status = source.stat()
        parts += [f"column {column or COLUMN}", f"{status.st_size} bytes", f"written at {status.st_mtime_ns}"]
    return ", ".join(parts).replace("\n", " ")


def _table(file: Path) -> Iterator[str]:
    """Return the paths in a table, which is read as a data set is."""
    source = open_table(file, PRESETS["mnist"], None, labelled_images=False, numbers=None, unit="").source
    return map(os.fsdecode, source.names) if isinstance(source, FileSource) else iter(())


def _list(file: Path) -> Iterator[str]:
    with file.open("rb") as binary:
        head = binary.read(1 << 16)
    if head.startswith(_NO_TEXT) or (b"\0" in head and encoding_of(file) != "utf-16"):
        raise UsageError(
            f"{file} is no text but an image, an archive or other bytes; give the folder of the image, an unpacked "
            "archive, a table, or a text file with one path a line"
        )
    names = NamesOnDisk(file.parent)
    return (names.on_disk(line.rstrip("\r\n")) for line in _lines(file) if line.strip())


def _lines(file: Path) -> Iterator[str]:
    with file.open(encoding=encoding_of(file), errors="surrogateescape") as lines:
        yield from lines


def _parquet(file: Path, column: str) -> Iterator[tuple[str, str | bytes]]:
    try:
        table = pyarrow_parquet().ParquetFile(file)
        if column not in table.schema_arrow.names:
            raise UsageError(f"{file} has no column {column!r}; it has {', '.join(table.schema_arrow.names)}")
        batches = table.iter_batches(batch_size=256, columns=[column])
        for row, value in enumerate(value for batch in batches for value in batch.column(0).to_pylist()):
            yield str(row), _encoded(value, file)
    except (needs("Parquet", "parquet", "pyarrow").ArrowException, OSError) as error:
        raise DataError(f"{file} cannot be read as Parquet ({' '.join(str(error).split())}); write it again") from error


def _encoded(value: Any, file: Path) -> str | bytes:
    """Return the image in a cell: bytes, a path (also as bytes), or Hugging Face's ``{"bytes": …, "path": …}``."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if value is None:
        return b""  # an empty cell fails to decode and is reported so
    if isinstance(value, bytes) and b"\0" not in value and value.lower().endswith(tuple(map(str.encode, SUFFIXES))):
        value = os.fsdecode(value)
    if isinstance(value, str):
        return value.encode() if value.startswith(_BASE64) else str(file.parent / value)
    if isinstance(value, bytes):
        return value
    raise UsageError(f"{file}: expected a column of bytes, paths or structs of both, got {type(value).__name__}")


def pyarrow_parquet() -> Any:
    return needs("Parquet", "parquet", "pyarrow.parquet")


def scored_batches(
    model: FittedModel,
    data: ImageDataset,
    batch_images: int = BATCH_IMAGES,
    *,
    packed: Float[Tensor, "images columns"] | None = None,
    description: str = "",
) -> Iterator[tuple[Batch, Images, Float[Tensor, "batch columns"]]]:
    """Yield each batch of ``data``, its images on the model's device, and the pipeline's packed outputs on the CPU.

    Where the outputs of all images are known, ``packed``, nothing is computed.
    """
    check_read_by(model, data)
    compute = Compute(model.device, batch_images=batch_images)
    for batch in track_images(data, compute, description or f"evaluating {data.name}"):
        images = batch.images.to(model.device)
        if packed is None:
            count_images(len(images))
            yield batch, images, model.pipeline(images).cpu()
        else:
            yield batch, images, packed[: len(images)]
            packed = packed[len(images) :]


def check_read_by(model: FittedModel, data: ImageDataset) -> None:
    if different := model.preprocess.differences(data.preprocess):
        raise UsageError(
            f"expected {data.name} to be read through the model's preprocessing {model.preprocess}, got "
            f"{data.preprocess}, with another {', '.join(different)}; open it with preprocess=model.preprocess"
        )


@torch.inference_mode()
def dataset_outputs(model: FittedModel, data: ImageDataset, description: str) -> Outputs[Tensor]:
    """Return the outputs for every image, on the CPU; raises the errors of :func:`scored_batches`."""
    return model.outputs(torch.cat([packed for _, _, packed in scored_batches(model, data, description=description)]))


Columns = dict[str, list[Any]]  # the cells of all images, by column


def columns_of(prediction: BasePrediction, task: Task) -> Columns:
    """Return the columns of the model's task, null where its answers have no such field."""
    same = {name: [value] * len(prediction) for name, value in task.model_dump().items()}
    found = {**same, **prediction.columns()}
    return {name: found.get(name, [None] * len(prediction)) for name in task.columns()}


def merge(names: Sequence[str], errors: Sequence[str | None], scored: Columns) -> Columns:
    """Return the columns of a part; ``scored`` has the cells of the images without errors, in order."""
    cells = ((name, iter(column)) for name, column in scored.items())
    merged = {name: [None if error else next(column) for error in errors] for name, column in cells}
    return {"item": list(names), **merged, "error": list(errors)}


@contextmanager
def _whole(file: Path) -> Iterator[Path]:
    """Yield a temporary name that no other process has, then rename: a file exists as a whole or not at all."""
    partial = file.with_name(f"_{file.name}.{uuid.uuid4()}.partial")
    try:
        yield partial
        partial.replace(file)
    except OSError as error:  # A write alone does not say where it was.
        error.filename = error.filename or str(file)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _now(folder: Path) -> int:
    """Return the time of a folder's file system, which may be another machine's."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime_ns


def check_same(file: Path, line: str, noun: str, outputs: str = "*") -> None:
    """Write what outputs are of beside them, as a whole file since several processes may; if any are there, compare."""
    if file.is_symlink() or (file.exists() and not file.is_file()):
        raise UsageError(f"{file} is a link or no regular file; remove it, or give another folder")
    if not file.exists() or (file.read_text(encoding="utf-8").strip() != line and not any(file.parent.glob(outputs))):
        with _whole(file) as partial:
            partial.write_text(line + "\n", encoding="utf-8")
    if (found := file.read_text(encoding="utf-8").strip()) != line:
        raise UsageError(f"{file.parent} has outputs of {noun}, {found} and not {line}; give another folder")


def write(columns: Columns, types: Mapping[str, Any], file: Path, began: int) -> None:
    with _whole(file) as partial:
        if file.suffix == ".parquet":
            pyarrow_parquet().write_table(_arrow(columns, types), partial)
        else:
            rows = (dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True))
            partial.write_text("".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))
        with suppress(OSError):  # Images that change in the meantime are newer, where the file system allows it.
            os.utime(partial, ns=(began, began))


def errors_in(file: Path) -> list[tuple[str, str | None]]:
    """Return the columns ``item`` and ``error`` of a written part."""
    try:
        if file.suffix == ".parquet":
            table = pyarrow_parquet().read_table(file, columns=["item", "error"])
            return list(zip(table["item"].to_pylist(), table["error"].to_pylist(), strict=True))
        rows = map(json.loads, file.read_text().splitlines())
        return [(row["item"], row["error"]) for row in rows]
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{file} cannot be read ({error}); remove it and run again") from error


def _arrow(columns: Columns, types: Mapping[str, Any]) -> Any:
    import pyarrow as pa

    arrow = {name: _arrow_type(types.get(name, str)) for name in columns}
    return pa.table(
        {
            name: pa.array([list(each.items()) if each else each for each in column], arrow[name])
            if pa.types.is_map(arrow[name])
            else pa.array(column, arrow[name])
            for name, column in columns.items()
        }
    )


def _arrow_type(annotation: Any) -> Any:
    import pyarrow as pa

    if get_origin(annotation) in (Union, UnionType):
        (annotation,) = (each for each in get_args(annotation) if each is not NoneType)
    plain = {float: pa.float32(), int: pa.int64(), bool: pa.bool_(), str: pa.string()}
    if annotation in plain:
        return plain[annotation]
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return pa.struct([(name, _arrow_type(field.annotation)) for name, field in annotation.model_fields.items()])
    inner = get_args(annotation)
    if get_origin(annotation) is list:
        return pa.list_(_arrow_type(inner[0]))
    if get_origin(annotation) is dict:
        return pa.map_(*map(_arrow_type, inner))
    return pa.string()  # literals


BATCHES_AHEAD = 2  # the number of batches that are decoded ahead while the network computes one
NOT_FINITE = "the network's outputs are not finite"  # the error of an image
Parts = Iterable[list[NamedImage]]
Decoded = npt.NDArray[np.uint8] | str  # decoded pixels, or the reason why there are none


@dataclass(frozen=True)
class PartCount:
    images: int
    errors: int  # images without an answer
    written: bool  # False if the file existed already


@dataclass
class PartFolder:
    """A folder of parts, and one of their maps: what needs no model."""

    out: Path
    file_format: str
    maps: Path | None = None
    found: dict[int, PartCount] = field(default_factory=dict)  # parts that need not be computed

    def check(self, version: str, has_map: bool, parts: Parts = (), *, rank: int = 0, world: int = 1) -> None:
        """Refuse outputs of another bundle, format or input, which may have grown; find the parts of a process."""
        if self.maps is not None and not has_map:
            raise UsageError(f"{NO_MAP}, or leave out --maps")
        first = [*islice(parts := iter(parts), 1)]  # Before a folder is made: the input may be mistyped.
        for folder in filter(None, (self.out, self.maps)):
            folder.mkdir(parents=True, exist_ok=True)
        form, suffixes = self.file_format, [file.suffix for file in self.out.glob("part-*")]
        if {*suffixes} & {f".{each}" for each in TABLE_FORMATS if each != form}:
            raise UsageError(f"{self.out} has parts in another format than {form}; give that, or another folder")
        check_same(self.out / VERSION_FILE, version, "another bundle")
        left = suffixes.count(f".{form}")
        for number, images in enumerate(chain(first, parts) if left else ()):
            left -= self._file(number).exists()
            if number % world == rank and (count := self._count(number, images)):
                self.found[number] = count
            if left == 0:
                break
        self._check_owner(first[0] if first and suffixes else (), begins=True)

    def _count(self, number: int, images: Sequence[NamedImage]) -> PartCount | None:
        """Return the count of a part that is there as a whole, with its maps, and of which no image has changed."""
        file, after = self._file(number), self._file(number + 1)
        there = errors_in(file) if file.exists() else []
        names, rest = [each.name for each in images[: len(there)]], [each.name for each in images[len(there) :]]
        follow = [name for name, _ in errors_in(after)] if there and rest and after.exists() else []
        was_split = 0 < len(follow) <= len(there) and follow[: len(rest)] == rest[: len(follow)]  # into smaller parts
        if was_split or names != [name for name, _ in there]:
            raise UsageError(f"{file} has other images than the input now; give another --out, or remove it")
        good = [row for row, (_, error) in enumerate(there) if error is None]
        has_maps = self.maps is None or all(_map_file(self.maps, number, row).exists() for row in good)
        is_done = len(there) == len(images) and has_maps and not _any_changed(images, there, file)
        return PartCount(len(images), len(images) - len(good), written=False) if is_done else None

    def _check_owner(self, images: Sequence[NamedImage], *, begins: bool = False) -> None:
        """Compare whose parts and maps are there; one that begins where there are none may correct its flags."""
        if images and images[0].source:
            check_same(self.out / INPUT_FILE, images[0].source, "other images", "part-*" if begins else "*")
        if self.maps is not None:
            rows = printable(os.path.relpath(self.out.resolve(), self.maps.resolve()))
            check_same(self.maps / OUT_FILE, rows, "other rows", "*-*.png" if begins else "*")

    def _file(self, number: int) -> Path:
        return self.out / f"part-{number:05d}.{self.file_format}"


class PartWriter(PartFolder):
    """Computes the outputs of parts and writes them; row 17 of part 3 has the map ``00003-0017.png``, both from 0."""

    def __init__(
        self,
        model: FittedModel,
        out: str | Path,
        file_format: str,
        threads: int | None = None,
        maps: Path | None = None,
    ) -> None:
        super().__init__(Path(out), file_format, maps)
        self.check(model.version, model.pipeline.map is not None)
        self.model, self.threads = model, threads or os.cpu_count() or 1
        self._began = {folder: _now(folder) for folder in (self.out, maps) if folder is not None}

    def __call__(self, number: int, images: Sequence[NamedImage]) -> PartCount:
        """Write the file of a part and its maps, unless they exist already and no image has changed."""
        count = self.found.get(number) or self._count(number, images)
        self._check_owner(images, begins=True)
        if count is not None:
            return count
        began = _now(self.out)
        columns = self.columns(images, number)
        self._check_owner(images)  # Another process may have begun in the same folder.
        write(columns, self.model.task.columns(), self._file(number), began)
        for row, error in enumerate(columns["error"]):
            if self.maps is not None and error is not None:
                _map_file(self.maps, number, row).unlink(missing_ok=True)
        return PartCount(len(images), sum(error is not None for error in columns["error"]), written=True)

    def check_no_more(self, parts: int) -> None:
        """Check that there are no more parts, as of an input that shrank; remove what killed runs left."""
        for folder, began in self._began.items():
            for left in folder.glob("*-*.partial"):
                with suppress(FileNotFoundError):  # Another process may finish one of its own.
                    if left.stat().st_mtime_ns < began:
                        left.unlink()
        first = self._file(parts).name
        there = (file.name for file in self.out.glob(f"part-*.{self.file_format}"))
        more = [name for name in there if (len(name), name) >= (len(first), first)]
        if more:
            raise UsageError(
                f"{self.out} has {min(more)}, beyond the {parts} parts of this input; give another --out, or remove it"
            )

    def columns(self, images: Sequence[NamedImage], number: int = 0) -> Columns:
        errors: list[str | None] = []
        scored: Columns = {name: [] for name in self.model.task.columns()}
        for decoded in self._decode(images):
            rows = [len(errors) + row for row, each in enumerate(decoded) if not isinstance(each, str)]
            errors += [each if isinstance(each, str) else None for each in decoded]
            pixels = [each for each in decoded if not isinstance(each, str)]
            if pixels:
                prediction = self.model.predict(torch.from_numpy(np.stack(pixels)), maps=self.maps is not None)
                finite = prediction.outputs.packed.isfinite().all(dim=1)
                for row in compress(rows, (~finite).tolist()):
                    errors[row] = NOT_FINITE
                prediction = prediction[finite]
                if self.maps is not None and prediction.maps is not None:
                    for row, grey in zip(compress(rows, finite.tolist()), prediction.maps.numpy(), strict=True):
                        with _whole(_map_file(self.maps, number, row)) as partial:
                            partial.write_bytes(png_of(grey))
                for name, column in columns_of(prediction, self.model.task).items():
                    scored[name] += column
        return merge([each.name for each in images], errors, scored)

    def _decode(self, images: Sequence[NamedImage]) -> Iterator[list[Decoded]]:
        """Yield batches of decoded images, with :data:`BATCHES_AHEAD` more being decoded by threads."""
        ahead: deque[list[Future[Decoded]]] = deque()
        with ThreadPoolExecutor(self.threads, "psc-decode") as pool:
            for start in range(0, len(images), MAX_BATCH):
                ahead.append([pool.submit(self._read, each.image) for each in images[start : start + MAX_BATCH]])
                if len(ahead) > BATCHES_AHEAD:
                    yield [future.result() for future in ahead.popleft()]
            for batch in ahead:
                yield [future.result() for future in batch]

    def _read(self, image: str | bytes) -> Decoded:
        try:
            return read_image(image, self.model.preprocess)
        except (ImageError, UsageError) as error:
            return str(error)


def _any_changed(images: Sequence[NamedImage], there: Sequence[tuple[str, str | None]], file: Path) -> bool:
    """Return whether an image's file came or changed since a part was begun, or can be opened only now."""
    began = file.stat().st_mtime_ns
    for each, (_, error) in zip(images, there, strict=True):
        with suppress(OSError, ValueError, ImageError):  # Missing, or no path: that is this image's error.
            if isinstance(each.image, str):
                is_newer = Path(each.image).stat().st_mtime_ns >= began
                if is_newer or ((error or "").startswith(CANNOT_READ) and sample_file(each.image)):
                    return True
    return False


def _map_file(maps: Path, number: int, row: int) -> Path:
    return maps / f"{number:05d}-{row:04d}.png"


def write_parts(writer: PartWriter, parts: Parts, *, rank: int = 0, world: int = 1) -> Iterator[PartCount]:
    """Write the parts of process ``rank`` of ``world``, number ≡ rank modulo world, and yield a count for each."""
    count = 0
    for number, images in enumerate(parts):
        count = number + 1
        if number % world == rank:
            yield writer(number, images)
    if rank == 0:
        writer.check_no_more(count)


SHARDS_PER_ACTOR = 4  # several, so that a fast actor can take work from a slow one, and a lost actor loses little


class ShardWriter:
    def __init__(self, make_writer: Callable[[], PartWriter], make_parts: Callable[[], Parts], shards: int) -> None:
        self._writer, self._make_parts, self._shards = make_writer(), make_parts, shards

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        counts = list(write_parts(self._writer, self._make_parts(), rank=int(row["id"]), world=self._shards))
        return {name: [getattr(each, name) for each in counts] for name in PartCount.__annotations__}


def write_on_ray(
    make_writer: Callable[[], PartWriter], make_parts: Callable[[], Parts], actors: int
) -> Iterator[PartCount]:
    """Write all parts and yield a count for each, like :func:`write_parts`."""
    ray_data = needs("--ray", "ray", "ray.data")
    shards = SHARDS_PER_ACTOR * actors
    rows = ray_data.range(shards, override_num_blocks=shards).map(
        ShardWriter,
        fn_constructor_args=(make_writer, make_parts, shards),
        concurrency=actors,
        num_gpus=1 if torch.cuda.is_available() else None,
    )
    for row in rows.iter_rows():
        yield from map(PartCount, row["images"], row["errors"], row["written"])
