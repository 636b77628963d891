"""Score images part by part, so that an interrupted run can continue and several processes can share the work.

Part i holds the images [i·n, (i + 1)·n) and becomes one file, ``part-00000.parquet`` and so on.  A part is computed in
the same batches by any process, so its file is the same from one process, from several, and after a restart.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import compress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from psc_core.errors import ImageError, UsageError
from psc_core.images.inputs import read_image
from psc_core.images.png import png_of
from psc_core.model.base import MAX_BATCH, FittedModel
from psc_core.model.pipeline import NO_MAP
from psc_core.scoring.inputs import NamedImage
from psc_core.scoring.outputs import Columns, columns_of, errors_in, merge, write
from psc_core.tasks.prediction import BasePrediction

BATCHES_AHEAD = 2
"""The number of batches that are decoded ahead while the network computes one."""

NOT_FINITE = "the network's outputs are not finite"
"""The error of an image for which the network gives no usable output."""

Decoded = npt.NDArray[np.uint8] | str
"""Decoded pixels, or the reason why there are none."""


@dataclass(frozen=True)
class PartCount:
    """The number of images in a part, and the outcome."""

    images: int
    errors: int  # images without an answer
    written: bool  # False if the file existed already


class PartWriter:
    """Computes the outputs of parts with one model and writes them.

    Args:
        model: A model loaded from a bundle.
        out: The folder for the files of the parts.
        file_format: ``"parquet"`` or ``"jsonl"``.
        threads: The number of threads that decode images.
        maps: The folder for a PNG of each image with an answer: ``00003-0017.png`` for row 17 of part 3, both from 0.

    Raises:
        UsageError: If ``maps`` is given and the model has no map.
    """

    def __init__(
        self, model: FittedModel, out: Path, file_format: str, threads: int | None = None, maps: Path | None = None
    ) -> None:
        if maps is not None:
            if model.pipeline.map is None:
                raise UsageError(f"{NO_MAP}, or leave out --maps")
            maps.mkdir(parents=True, exist_ok=True)
        self.model, self.out, self.file_format, self.maps = model, out, file_format, maps
        self.threads = threads or os.cpu_count() or 1

    def __call__(self, number: int, images: Sequence[NamedImage]) -> PartCount:
        """Write the file of a part and its maps, unless they exist already.

        Raises:
            UsageError: If the file exists but has other images.
        """
        file = self._file(number)
        names = [each.name for each in images]
        if file.exists():
            there = errors_in(file)
            if [name for name, _ in there] != names:
                raise UsageError(f"{file} has other images than the input now; give another --out, or remove it")
            good = [row for row, (_, error) in enumerate(there) if error is None]
            if self.maps is None or all(_map_file(self.maps, number, row).exists() for row in good):
                return PartCount(len(names), len(names) - len(good), written=False)
        columns = self.columns(images, number)
        write(columns, self.model.task.columns(), file)
        return PartCount(len(names), sum(error is not None for error in columns["error"]), written=True)

    def check_no_more(self, parts: int) -> None:
        """Raise :class:`UsageError` if the folder has more parts than the input, as after an input has shrunk."""
        first = self._file(parts).name
        there = (file.name for file in self.out.glob(f"part-*.{self.file_format}"))
        more = [name for name in there if (len(name), name) >= (len(first), first)]
        if more:
            raise UsageError(
                f"{self.out} has {min(more)}, beyond the {parts} parts of this input; give another --out, or remove it"
            )

    def _file(self, number: int) -> Path:
        return self.out / f"part-{number:05d}.{self.file_format}"

    def columns(self, images: Sequence[NamedImage], number: int = 0) -> Columns:
        """Compute the columns of a part, and write its maps."""
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
                self._write_maps(prediction, number, list(compress(rows, finite.tolist())))
                for name, column in columns_of(prediction, self.model.task).items():
                    scored[name] += column
        return merge([each.name for each in images], errors, scored)

    def _write_maps(self, prediction: BasePrediction, number: int, rows: Sequence[int]) -> None:
        if self.maps is not None and prediction.maps is not None:
            for row, grey in zip(rows, prediction.maps.numpy(), strict=True):
                _map_file(self.maps, number, row).write_bytes(png_of(grey))

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


def _map_file(maps: Path, number: int, row: int) -> Path:
    return maps / f"{number:05d}-{row:04d}.png"


def write_parts(
    writer: PartWriter, parts: Iterable[list[NamedImage]], *, rank: int = 0, world: int = 1
) -> Iterator[PartCount]:
    """Write the parts of process ``rank`` of ``world``, number ≡ rank modulo world, and yield a count for each.

    Raises:
        UsageError: If the folder has other images in a part, or (in process 0, at the end) more parts.
    """
    count = 0
    for number, images in enumerate(parts):
        count = number + 1
        if number % world == rank:
            yield writer(number, images)
    if rank == 0:
        writer.check_no_more(count)
