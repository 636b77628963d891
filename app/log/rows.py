"""Turn predictions into rows: predictions wait, become open rows of a model, and then a Parquet file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from app.inference.decoder import EncodedImage
from app.inference.request import Images
from app.log.sampling import Sampling, number_of
from psc_core.log.images import INPUT, extension_of, file_of
from psc_core.log.models import LoggedModel
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, arrow, image_path, row_schema
from psc_core.tasks.decide import BaseDecisions
from psc_core.tasks.outputs import FloatArray, Outputs
from psc_core.tasks.policy import BasePolicy

_FILLED: Final[tuple[str, ...]] = (
    "time", REQUEST_ID, IMAGE_INDEX, "policy", "audit", "audit_probability", SHA256, IMAGE_PATH, "label",
)  # fmt: skip
"""The columns that are filled row by row; all others come from outputs and decisions."""

ROW_BYTES: Final = 512
"""An estimate of a row's size in memory without its outputs, bytes."""


@dataclass(frozen=True, eq=False)
class Source:
    """A model whose predictions are logged: its name in the service, its description in the log, and its sampling."""

    name: str
    model: LoggedModel
    sampling: Sampling


class Waiting(NamedTuple):
    """The images of one request, as the event loop hands them over."""

    source: Source
    time_us: int  # Microseconds since 1970, UTC.
    request_id: str
    images: Sequence[EncodedImage] | Images
    outputs: Outputs[FloatArray]
    decisions: BaseDecisions
    policy: BasePolicy
    is_monitored: bool  # Only monitored images come into the audit slice.
    size: int  # An estimate of its size in memory, bytes.

    def drawn(self) -> list[tuple[int, float]]:
        """Return the indices of the images that get a row, each with its number u (:mod:`app.log.sampling`)."""
        rows, codes = self.source.sampling.rows, self.decisions.decision.tolist()
        numbers = [(index, number_of(self.request_id, index)) for index in range(len(codes))]
        return [(index, u) for (index, u), code in zip(numbers, codes, strict=True) if u < rows[code]]

    def file(self, index: int) -> tuple[bytes, str]:
        """Return an image's file as received, or a file made of its pixels, with its extension."""
        image = self.images[index]
        return (image.data, extension_of(image.data)) if isinstance(image, EncodedImage) else (file_of(image), INPUT)


class ImageToStore(NamedTuple):
    """An image that was drawn to be stored."""

    path: str
    data: bytes
    row: int  # The index of its row among the open rows.


@dataclass
class OpenRows:
    """The rows of one model and day that are not written yet."""

    source: Source
    day: str
    size: int = 0  # An estimate of their size in memory, bytes.
    _cells: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _FILLED})
    _outputs: list[Outputs[FloatArray]] = field(default_factory=list)
    _codes: list[npt.NDArray[np.int8]] = field(default_factory=list)  # The codes of the decisions.

    def __len__(self) -> int:
        return len(self._cells[REQUEST_ID])

    def add(self, waiting: Waiting, drawn: Sequence[tuple[int, float]]) -> list[ImageToStore]:
        """Add the rows of the drawn images; return the images to store."""
        sampling, policy, wanted = self.source.sampling, waiting.policy.model_dump_json(), []
        outputs, decisions, at = waiting.outputs, waiting.decisions, [index for index, _ in drawn]
        if len(at) < len(outputs):
            outputs = Outputs(outputs.packed[at], outputs.scores, outputs.gates)
            decisions = decisions.at(at)
        made: list[tuple[Any, ...]] = []
        audit = sampling.audit if waiting.is_monitored else 0.0
        labels = decisions.labels(self.source.model.classes)
        for (index, u), code, label in zip(drawn, decisions.decision.tolist(), labels, strict=True):
            data, extension = waiting.file(index)
            digest = hashlib.sha256(data).hexdigest()
            if u < sampling.images[code]:
                wanted.append(ImageToStore(image_path(digest, extension), data, len(self) + len(made)))
            made.append((waiting.time_us, waiting.request_id, index, policy, u < audit, audit, digest, None, label))
        for name, cells in zip(_FILLED, zip(*made, strict=True), strict=True):
            self._cells[name].extend(cells)
        self._outputs.append(outputs)
        self._codes.append(decisions.decision)
        self.size += outputs.packed.nbytes + ROW_BYTES * len(at)
        return wanted

    def stored(self, image: ImageToStore) -> None:
        """Note in an image's row that the image is stored."""
        self._cells[IMAGE_PATH][image.row] = image.path

    def to_parquet(self) -> Any:
        """Return a buffer with the rows as a Parquet file."""
        pa = arrow()
        first, model, n = self._outputs[0], self.source.model, len(self)
        outputs = Outputs(np.concatenate([each.packed for each in self._outputs]), first.scores, first.gates)
        codes = np.concatenate(self._codes)
        cells: dict[str, Any] = {
            **self._cells,
            **{score: np.ascontiguousarray(outputs[score]) for score in outputs.scores},
            "bundle_version": [model.version] * n,
            "probabilities": _lists(outputs.probabilities) if outputs.probabilities.size else [None] * n,
            "gates": _maps(outputs),
            "decision": np.array(model.task.decision_names(), dtype=object)[codes],
            "sampling_probability": np.array(self.source.sampling.rows)[codes],
        }
        schema = row_schema(outputs.scores)
        arrays = [
            cells[each.name] if isinstance(cells[each.name], pa.Array) else pa.array(cells[each.name], each.type)
            for each in schema
        ]
        sink = pa.BufferOutputStream()
        pa.parquet.write_table(pa.Table.from_arrays(arrays, schema=schema), sink, compression="zstd")
        return sink.getvalue()


def day_of(time_us: int) -> str:
    """Return the day (UTC) of a time in microseconds since 1970."""
    return datetime.fromtimestamp(time_us / 1e6, UTC).strftime("%Y-%m-%d")


def _lists(values: FloatArray) -> Any:
    pa = arrow()
    return pa.ListArray.from_arrays(_offsets(values), pa.array(np.ascontiguousarray(values).ravel()))


def _maps(outputs: Outputs[FloatArray]) -> Any:
    pa, values = arrow(), outputs.gate_p_values
    names = pa.array(list(outputs.gates) * len(values), pa.string())
    return pa.MapArray.from_arrays(_offsets(values), names, pa.array(np.ascontiguousarray(values).ravel()))


def _offsets(values: FloatArray) -> Any:
    rows, width = values.shape
    return arrow().array(np.arange(rows + 1, dtype=np.int32) * width)
