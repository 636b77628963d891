"""The files of a log: the columns of its rows and labels, its folder or bucket, and how rows and images are read.

The scores of a task, float32, follow the columns that all tasks share; :func:`scores_in` tells them apart.  pyarrow is
imported only when it is needed (extra ``log``).
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path, PurePosixPath
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4

import numpy as np
import numpy.typing as npt
from PIL import Image

from psc_core.data.dataset import ImageSource
from psc_core.errors import DataError, ImageError, UsageError, needs, warn
from psc_core.images.decode import PILLOW_MAX_PIXELS, decode_image
from psc_core.images.preprocess import Preprocess
from psc_core.tasks import task_of_manifest
from psc_core.tasks.base import Task
from psc_core.text import compose

MODELS: Final = "models"
IMAGES: Final = "images"
LABELS: Final = "labels"
# The columns of rows and labels that identify an image; only rows have its path.
REQUEST_ID: Final = "request_id"
IMAGE_INDEX: Final = "image_index"
SHA256: Final = "image_sha256"
IMAGE_PATH: Final = "image_path"


def arrow() -> Any:
    return needs(
        "the prediction log", "log", "pyarrow.dataset", "pyarrow.parquet", "pyarrow.compute", "pyarrow.fs", "pyarrow"
    )


def row_schema(scores: Sequence[str]) -> Any:
    pa = arrow()
    return pa.schema(
        [
            ("time", pa.timestamp("us", tz="UTC")),  # of the answer
            (REQUEST_ID, pa.string()),  # trace and span of the answer's header ``traceresponse``: "TRACE-SPAN"
            (IMAGE_INDEX, pa.int32()),  # position in the request, from 0
            ("bundle_version", pa.string()),
            ("policy", pa.string()),  # the thresholds in use, as JSON
            *((score, pa.float32()) for score in scores),
            ("probabilities", pa.list_(pa.float32())),  # in class order; null for a task without probabilities
            ("checks", pa.map_(pa.string(), pa.float32())),  # p-value of each check; empty for a model without checks
            ("label", pa.string()),  # null for a task whose answers have no label
            ("decision", pa.string()),
            ("sampling_probability", pa.float64()),  # of an image with this decision to enter the log
            ("sampled", pa.bool_()),  # whether the row belongs to the random sample
            ("sample_probability", pa.float64()),  # of any image to enter the random sample
            (SHA256, pa.string()),  # of the bytes as received, hexadecimal; null once the image is erased
            (IMAGE_PATH, pa.string()),  # of the logged image, relative to the log; null if it was not stored
        ]
    )


def label_schema() -> Any:
    pa = arrow()
    return pa.schema(
        [
            (REQUEST_ID, pa.string()),  # null if the label names only a digest
            (IMAGE_INDEX, pa.int32()),
            (SHA256, pa.string()),  # null if the label names only a request
            ("kind", pa.string()),  # one of :data:`.LABEL_KINDS`
            ("label", pa.string()),  # a class, or the number of a regression as text; null with other labels
            ("source", pa.string()),  # the person or tool that it comes from
            ("time", pa.timestamp("us", tz="UTC")),
            ("model", pa.string()),  # of the row; null in older labels
        ]
    )


def scores_in(schema: Any) -> list[str]:
    """Return the names of the scores among the columns of rows."""
    common = set(row_schema(()).names)
    return [field.name for field in schema if field.name not in common and field.type == arrow().float32()]


def rows_path(model: str, day: str) -> str:
    return f"model={model}/day={day}/part-{uuid4().hex}.parquet"


def labels_path() -> str:
    return f"{LABELS}/part-{uuid4().hex}.parquet"


def image_path(sha256: str, extension: str) -> str:
    return f"{IMAGES}/{sha256[:2]}/{sha256}.{extension}"


def model_path(version: str) -> str:
    return f"{MODELS}/{version}.json"


_OPTIONS: Final = ("region", "endpoint_override")
_SECONDS: Final = 3.0  # after which a bucket that accepts no connection or does not answer is given up


@dataclass(frozen=True)
class Log:
    """A log; all paths are relative to it, with ``/`` as separator."""

    where: str  # the place of the log as the user named it
    files: Any  # the pyarrow file system that holds it
    root: str  # its path in that file system

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def put(self, name: str, data: Any, *, synced: bool = True) -> None:
        """Write or replace a file, which readers see once it is complete; ``synced`` outlasts a power cut."""
        if self.is_folder:
            _put_local(Path(self.path(name)), data, synced=synced)
            return
        # An object exists only once it is closed; if writing fails, it never exists.
        with self.files.open_output_stream(self.path(name)) as stream:
            stream.write(data)

    def get(self, name: str) -> bytes:
        with self.files.open_input_stream(self.path(name)) as stream:
            content: bytes = stream.read()
            return content

    def delete(self, name: str) -> None:
        self.files.delete_file(self.path(name))

    def written(self, name: str) -> datetime | None:
        found: datetime | None = self.files.get_file_info(self.path(name)).mtime
        return found

    def names(self, folder: str = "", *, suffix: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder that end in ``suffix`` with their times of writing (UTC), by name."""
        for name, written in self._all(folder):
            if name.endswith(suffix) and not _is_partial(name):
                yield name, written

    def partial(self, folder: str = "") -> Iterator[tuple[str, datetime]]:
        """Yield the files below a folder that are being written or were never completed; may raise ``OSError``."""
        if self.is_folder:  # buckets never show incomplete files
            yield from (each for each in self._all(folder) if _is_partial(each[0]))

    def _all(self, folder: str) -> Iterator[tuple[str, datetime]]:
        fs = arrow().fs
        base = self.path(folder).rstrip("/")
        found = self.files.get_file_info(fs.FileSelector(base, allow_not_found=True, recursive=True))
        for info in sorted(found, key=lambda each: each.path):
            if info.type == fs.FileType.File:
                yield info.path.removeprefix(f"{self.root}/"), info.mtime

    def folders(self, folder: str = "") -> list[str]:
        fs = arrow().fs
        found = self.files.get_file_info(fs.FileSelector(self.path(folder).rstrip("/"), allow_not_found=True))
        return sorted(info.base_name for info in found if info.type == fs.FileType.Directory)

    @property
    def is_folder(self) -> bool:
        return isinstance(self.files, arrow().fs.LocalFileSystem)


def open_log(where: str | Path) -> Log:
    """Open a log, a folder or ``s3://BUCKET/PREFIX?region=…``, which need not exist before it is written to."""
    fs = arrow().fs
    text = str(where)
    if "://" not in text:
        return Log(text, fs.LocalFileSystem(), str(Path(text).absolute()))
    if not text.startswith("s3://"):
        raise UsageError(f"expected a folder or s3://BUCKET/PREFIX, got {text!r}")
    parts = urlsplit(text)
    options = dict(parse_qsl(parts.query))
    if not parts.netloc or (unknown := sorted(options.keys() - _OPTIONS)):
        wrong = f"the option {unknown[0]}" if parts.netloc else "no bucket"
        raise UsageError(f"expected s3://BUCKET/PREFIX with at most {' and '.join(_OPTIONS)}, got {wrong}; correct it")
    scheme, _, endpoint = options.get("endpoint_override", "").rpartition("://")
    try:
        region = options.get("region") or (None if endpoint else fs.resolve_s3_region(parts.netloc))
        files = fs.S3FileSystem(
            region=region,
            scheme=scheme or "https",
            endpoint_override=endpoint or None,
            connect_timeout=_SECONDS,
            request_timeout=_SECONDS,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=1),  # retries would keep a process from ending
            allow_delayed_open=True,  # one request for a small file instead of three
        )
    except (OSError, ValueError) as error:
        raise UsageError(f"{text} cannot be opened ({error}); check the bucket, or give ?region=") from error
    return Log(text.partition("?")[0], files, f"{parts.netloc}{parts.path}".rstrip("/"))


def open_to_write(where: str | Path) -> Log:
    """Open a log, and check that a folder is writable; a bucket is not checked, because it may be down for a moment."""
    log = open_log(where)
    if log.is_folder:
        probe = f".probe.{uuid4().hex}"  # unique, so that no worker deletes another's
        try:
            log.put(probe, b"")
            log.delete(probe)
        except OSError as error:
            reason = error.strerror or error
            raise UsageError(f"the log {where} cannot be written to ({reason}); choose another folder") from error
    return log


def _is_partial(name: str) -> bool:
    return name.rsplit("/", 1)[-1].startswith(".")


def _put_local(path: Path, data: Any, *, synced: bool) -> None:
    partial = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        try:
            file = partial.open("wb")
        except FileNotFoundError:
            # Only here, because the folder of a day or of a digest is nearly always there.
            path.parent.mkdir(parents=True, exist_ok=True)
            file = partial.open("wb")
        with file:
            file.write(data)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:  # A write does not say where it was.
            error.filename = str(path)
        raise


_BATCH: Final = 16_384


def models_in(log: Log) -> list[str]:
    return [name.removeprefix("model=") for name in log.folders() if name.startswith("model=")]


def days_of(log: Log, model: str, *, since: str | None = None, until: str | None = None) -> list[str]:
    """Return the days with rows of a model as ``YYYY-MM-DD``, the oldest first; may raise ``OSError``."""
    days = [name.removeprefix("day=") for name in log.folders(f"model={model}") if name.startswith("day=")]
    return [day for day in days if (since or day) <= day <= (until or day)]


def logged_model(log: Log, name: str | None) -> str:
    """Return the name of a model that has rows; None asks for the only one."""
    names = models_in(log)
    if not names:
        raise UsageError(f"{log.where} has no rows; give the folder that psc-serve --log writes")
    if name is None and len(names) == 1:
        return names[0]
    if name is None or name not in names:
        given = f"has no rows of model {name}" if name else "has rows of several models"
        raise UsageError(f"{log.where} {given}; it has {', '.join(names)}, name one by --model")
    return name


def read_rows(
    log: Log,
    model: str,
    *,
    sampled: bool = False,
    days: Sequence[str] | None = None,  # in the order of reading; None reads all, the oldest first
    columns: Sequence[str] | None = None,  # scores only where a file has them; None reads all
) -> Iterator[Any]:
    """Yield the rows of a model as ``pyarrow.RecordBatch``, each with rows of a single bundle."""
    ds = arrow().dataset
    wanted = ds.field("sampled") if sampled else ds.scalar(True)
    return (
        batch
        for day in (days_of(log, model) if days is None else days)
        for name, _ in log.names(f"model={model}/day={day}", suffix=".parquet")
        for batch in rows_of_file(log, name, wanted, columns or ())
    )


def find_row(
    log: Log, request_id: str, image_index: int, ends: float = math.inf, searched: dict[str, str] | None = None
) -> dict[str, Any] | None:
    """Return digest, path, ``bundle_version`` and ``model`` of an image's row, or None; search the newest days first.

    No file is opened after the monotonic time ``ends``, nor one of ``searched``, which gets the others with their days.
    """
    ds, pa, searched = arrow().dataset, arrow(), {} if searched is None else searched
    wanted = (ds.field(REQUEST_ID) == request_id) & (ds.field(IMAGE_INDEX) == image_index)
    days = [(day, name) for name in models_in(log) for day in days_of(log, name)]
    for day, model in sorted(days, reverse=True):
        for name, _ in log.names(f"model={model}/day={day}", suffix=".parquet"):
            if name in searched:
                continue
            if time.monotonic() > ends:
                return None
            searched[name] = day
            # A data set would take six times as long to open as this file, and most files do not have the row.
            with naming_damage(log, name, "rows"), log.files.open_input_file(log.path(name)) as file:
                ids = pa.parquet.ParquetFile(file).read(columns=[REQUEST_ID], use_threads=False)[REQUEST_ID]
                if pa.compute.index(ids, request_id).as_py() < 0:
                    continue
            for batch in rows_of_file(log, name, wanted, [SHA256, IMAGE_PATH, "bundle_version"]):
                return {**batch.slice(0, 1).to_pylist()[0], "model": model}
    return None


@contextmanager
def naming_damage(log: Log, name: str, of: str) -> Iterator[None]:
    """Turn the errors of a block that reads a damaged file into a :class:`.DataError` that names it."""
    try:
        yield
    except FileNotFoundError:
        raise
    except (arrow().ArrowException, OSError, KeyError, TypeError) as error:
        if isinstance(error, OSError):
            log.get(name)  # It raises where the place is to blame, and not the file.
        raise DataError(f"{log.where}/{name} is not a file of {of} ({error}); remove it") from error


def rows_of_file(log: Log, name: str, wanted: Any, columns: Sequence[str] = (), without: str = "") -> Iterator[Any]:
    """Yield the rows of one file that match a ``pyarrow.dataset`` filter, as :func:`read_rows` does."""
    with naming_damage(log, name, "rows"):
        # Each file is its own data set, because a data set of several files would have only the columns of the first.
        file = arrow().dataset.dataset(log.path(name), filesystem=log.files, format="parquet")
        names = file.schema.names
        known = {*names, *row_schema(()).names} - {without}
        some = [each for each in columns or names if each in known]
        batches = file.to_batches(columns=some, filter=wanted, batch_size=_BATCH)
        yield from (batch for batch in batches if batch.num_rows)


# The first bytes of the formats in :data:`psc_core.images.decode.IMAGE_FORMATS`, with their extensions.
_EXTENSIONS: Final = (
    (b"\xff\xd8\xff", "jpg"),
    (b"\x89PNG", "png"),
    (b"BM", "bmp"),
    (b"GIF8", "gif"),
    (b"II", "tif"),
    (b"MM", "tif"),
    (b"RIFF", "webp"),
)

INPUT: Final = "dib"  # of inputs that came as pixels: BMP by its other name, which received files never get
OTHER: Final = "img"  # of what has none of these signatures

MEDIA_TYPES: Final = {
    "jpg": "image/jpeg",
    **{name: f"image/{name}" for name in ("png", "bmp", "gif", "webp")},
    "tif": "image/tiff",
    INPUT: "image/bmp",
}


def extension_of(data: bytes) -> str:
    """Return the extension, without its dot, for the file of an image that was decoded."""
    return next((extension for signature, extension in _EXTENSIONS if data.startswith(signature)), OTHER)


def file_of(pixels: npt.NDArray[Any]) -> bytes:
    """Encode ``uint8 (1 or 3, height, width)`` as a BMP file, whose digest depends on no library's compression."""
    image = Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0))
    file = io.BytesIO()
    image.save(file, "BMP")
    return file.getvalue()


def pixels_of(file: bytes) -> npt.NDArray[np.uint8]:
    pixels = np.atleast_3d(np.asarray(decode_image(file, max_pixels=PILLOW_MAX_PIXELS)))
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


_NAME: Final = re.compile(r"[0-9a-f]{64}\.[a-z]{3,4}")
_BLOCK_BYTES: Final = 1 << 20
_READERS: Final = 16  # number of images that are read at once, as a bucket takes its time for each


@dataclass(frozen=True)
class LoggedImages(ImageSource):
    """Images given by their paths in a log, which hold the digests of their contents."""

    log: Log
    paths: Sequence[str]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int, preprocess: Preprocess) -> npt.NDArray[np.uint8]:
        path = PurePosixPath(self.paths[index])
        where, remedy = f"{self.log.where}/{path}", f"restore it, or run psc-log delete {self.log.where} {path.stem}"
        try:
            content = self.log.get(self.paths[index])
            if hashlib.sha256(content).hexdigest() != path.stem:
                raise DataError(f"{where} was changed since it was logged; {remedy}")
            if path.suffix != f".{INPUT}":
                # The service has applied its own --max-pixels before it answered.
                return preprocess.from_bytes(content, max_pixels=PILLOW_MAX_PIXELS)
            pixels = pixels_of(content)
        except (OSError, ImageError) as error:
            raise DataError(f"cannot read the image {where}: {error}; {remedy}") from error
        if pixels.shape != preprocess.shape:
            raise DataError(
                f"{where} was sent as a network input of the shape {pixels.shape}, and the bundle's network reads "
                f"{preprocess.shape}; give a bundle with that input, or leave its days out"
            )
        return pixels

    def fingerprint(self, index: int) -> bytes:
        return self.paths[index].encode()


def are_intact(log: Log, paths: Sequence[str]) -> list[bool]:
    """Return whether each image is there as it was logged, and warn of those that are not.

    A power cut cuts images short.  It does not look at them, so a random sample without them is still random.
    """

    def is_intact(path: str) -> bool:
        try:
            return hashlib.sha256(log.get(path)).hexdigest() == PurePosixPath(path).stem
        except FileNotFoundError:
            return False

    with ThreadPoolExecutor(_READERS, "psc-intact") as pool:
        found = list(pool.map(is_intact, paths))
    if False in found:
        first = paths[found.index(False)]
        warn(
            f"{found.count(False)} of {len(paths)} logged images are damaged or missing, and left out: the first is "
            f"{log.where}/{first}; restore it, or run psc-log delete {log.where} {PurePosixPath(first).stem}"
        )
    return found


def is_stored(sha256: str | None, path: str | None) -> bool:
    """Return whether a row names a logged image by a valid path."""
    if not sha256 or not path:
        return False
    return path == image_path(sha256, PurePosixPath(path).suffix.removeprefix("."))


def open_logged_image(log: Log, name: str) -> tuple[Any, int]:
    """Open the logged image ``SHA256.EXT``; return the file, at its beginning, and its size in bytes."""
    digest, _, extension = name.partition(".")
    path = log.path(image_path(digest, extension))
    if not _NAME.fullmatch(name) or log.files.get_file_info(path).type != arrow().fs.FileType.File:
        raise FileNotFoundError(name)
    file = log.files.open_input_file(path)
    found = hashlib.sha256()
    while block := file.read(_BLOCK_BYTES):
        found.update(block)
    if found.hexdigest() != digest:
        file.close()
        raise FileNotFoundError(name)
    file.seek(0)
    return file, file.size()


@dataclass(frozen=True)
class LoggedModel:
    version: str  # the digest of the bundle
    task: Task  # the task of the model
    classes: tuple[str, ...]  # the class names in the order of ``probabilities``; for a regression the bins

    def to_json(self) -> bytes:
        fields = {"version": self.version, "classes": self.classes, **self.task.manifest_fields()}
        return json.dumps(fields, ensure_ascii=False).encode()

    def check_label(self, label: str, marks: str = ".") -> str:
        """Return a person's label in the form of the log; raise :class:`.DataError` if the model cannot predict it."""
        return self.task.parse_label(label, self.classes, marks)


def read_model(log: Log, version: str) -> LoggedModel:
    name = model_path(version)
    try:
        fields: Any = json.loads(log.get(name))
        found = task_of_manifest(fields)
        if found is None:
            raise ValueError("a task that this version does not know")
        of_task = {field: fields[field] for field in found.model_fields}
        return LoggedModel(version, found.model_validate(of_task), tuple(map(compose, fields["classes"])))
    except FileNotFoundError as error:
        raise DataError(f"{log.where} has no {name}; restore it from a copy of the log") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{log.where}/{name} cannot be used ({error}); restore it from a copy of the log") from error
