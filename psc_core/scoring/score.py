"""Score images part by part, so that an interrupted run goes on and several processes share the work.

Part i holds the items [i·n, (i + 1)·n) and becomes one file, ``part-00000.parquet`` and so on.  A part is computed in
the same batches whoever computes it, so its file is the same from one process, from several, and after a restart.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from psc_core.errors import ImageError, UsageError
from psc_core.model.base import MAX_BATCH
from psc_core.model.inputs import read_image
from psc_core.model.load import Model
from psc_core.scoring.inputs import Item
from psc_core.scoring.outputs import FIELDS, VALUE_FIELDS, Table, as_table, items_of, merge, write

BATCHES_AHEAD = 2
"""Batches that are decoded while the network computes one."""

Decoded = npt.NDArray[np.uint8] | str
"""Pixels, or why there are none."""


@dataclass(frozen=True)
class Count:
    """What was done with a part."""

    images: int
    errors: int  # images that could not be read
    written: bool  # False: its file was there already


class PartScorer:
    """Scores parts with one model.

    Args:
        model: Of a bundle.
        out: Folder of the parts' files.
        file_format: ``"parquet"`` or ``"jsonl"``.
        threads: Decode images.
    """

    def __init__(self, model: Model, out: Path, file_format: str, threads: int | None = None) -> None:
        self.model, self.out, self.file_format = model, out, file_format
        self.threads = threads or os.cpu_count() or 1

    def __call__(self, number: int, items: Sequence[Item]) -> Count:
        """Score a part and write its file, unless it is there.

        Raises:
            UsageError: A file of other items is there.
        """
        file = self.out / f"part-{number:05d}.{self.file_format}"
        names = [item.name for item in items]
        if file.exists():
            if items_of(file) != names:
                raise UsageError(f"{file} has other images than the input now; give another --out, or remove it")
            return Count(len(names), 0, written=False)
        table = self.score(items)
        write(table, file)
        return Count(len(names), sum(error is not None for error in table["error"]), written=True)

    def score(self, items: Sequence[Item]) -> Table:
        """The table of the items."""
        errors: list[str | None] = []
        scored: Table = {name: [] for name in (VALUE_FIELDS if self.model.is_regression else FIELDS)}
        for decoded in self._decode(items):
            errors += [each if isinstance(each, str) else None for each in decoded]
            pixels = [each for each in decoded if not isinstance(each, str)]
            if pixels:
                for name, column in as_table(self.model.predict(torch.from_numpy(np.stack(pixels)))).items():
                    scored[name] += column
        return merge([item.name for item in items], errors, scored)

    def _decode(self, items: Sequence[Item]) -> Iterator[list[Decoded]]:
        """Batches of decoded images; threads are :data:`BATCHES_AHEAD` ahead."""
        ahead: deque[list[Future[Decoded]]] = deque()
        with ThreadPoolExecutor(self.threads, "psc-decode") as pool:
            for start in range(0, len(items), MAX_BATCH):
                ahead.append([pool.submit(self._read, item.image) for item in items[start : start + MAX_BATCH]])
                if len(ahead) > BATCHES_AHEAD:
                    yield [future.result() for future in ahead.popleft()]
            for batch in ahead:
                yield [future.result() for future in batch]

    def _read(self, image: str | bytes) -> Decoded:
        try:
            return read_image(image, self.model.preprocess)
        except (ImageError, UsageError) as error:
            return str(error)


def score_parts(scorer: PartScorer, parts: Iterable[list[Item]], *, rank: int = 0, world: int = 1) -> Iterator[Count]:
    """Score the parts of process ``rank`` of ``world``: those with number ≡ rank modulo world."""
    for number, items in enumerate(parts):
        if number % world == rank:
            yield scorer(number, items)
