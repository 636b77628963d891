"""Answer logged images again under another bundle, and find the decisions that change.

Only logged images can be answered again, and there are two samples of them.

* The random sample is drawn from all answered images.  A row of it stands for ``1 / sample_probability`` images,
  so its fractions estimate those of all images, with an interval
  (:func:`psc_core.metrics.weighted_interval`).
* All logged images, which include the random sample, were mostly stored because of the decision on them.  Their
  counts hold for these images alone, and say nothing about all images.

A row counts as often as its image was sent; each distinct image passes through the network once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import compress
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from psc_core.answers import ACCEPT
from psc_core.data.dataset import ImageDataset, label_images
from psc_core.errors import UsageError
from psc_core.log.store import (
    IMAGE_PATH,
    SHA256,
    Log,
    LoggedImages,
    are_intact,
    days_of,
    is_stored,
    logged_model,
    read_rows,
)
from psc_core.metrics import RateInterval, weighted_interval, weighted_median
from psc_core.model import FittedModel
from psc_core.scoring import dataset_outputs
from psc_core.tasks.base import FloatArray, Outputs, Task
from psc_core.text import compose

_COLUMNS: Final = [SHA256, IMAGE_PATH, "label", "decision", "sampled", "sample_probability"]
SHOWN_IMAGES: Final = 8  # maximum number of images that are shown for each flip


@dataclass(frozen=True, slots=True)
class Decided:
    decision: str
    label: str | None  # None for a task without labels


@dataclass(frozen=True, slots=True)
class Replayed:
    before: Decided
    after: Decided
    ood_score: float  # under the bundle, in nats
    weight: float | None  # number of images for which the row stands; None outside the random sample
    position: int  # of the image in :attr:`Replay.images`


@dataclass(frozen=True)
class Fraction:
    """A weighted fraction of the random sample, with the number of rows behind it."""

    rows: int
    value: float
    interval: RateInterval  # 95 %


@dataclass(frozen=True)
class Moves:
    """How far one of the numbers in the answers moved, in the target's unit, and the number of rows behind it."""

    name: str
    rows: int
    median: float
    largest: float


@dataclass(frozen=True)
class Replay:
    name: str
    version: str
    days: tuple[str, str]  # first and last, ``YYYY-MM-DD``
    rows: Sequence[Replayed]  # all rows
    images: ImageDataset  # distinct ones
    decisions: tuple[str, ...]  # in the order of the task's codes
    task: Task
    distances: Mapping[str, FloatArray]  # how far each number moved, (rows,); NaN where the log lacks it

    @property
    def has_labels(self) -> bool:
        """Whether answers have a label; those of a regression have none."""
        return any(row.after.label is not None for row in self.rows)

    @property
    def sample(self) -> list[Replayed]:
        return [row for row in self.rows if row.weight is not None]

    def count(self, before: str, after: str) -> int:
        return sum((row.before.decision, row.after.decision) == (before, after) for row in self.rows)

    def fraction(self, before: str, after: str) -> Fraction:
        return self._fraction([(row.before.decision, row.after.decision) == (before, after) for row in self.sample])

    def flipped(self) -> Fraction:
        """Return the fraction of all answered images with another decision."""
        return self._fraction([row.before.decision != row.after.decision for row in self.sample])

    def relabelled(self) -> Fraction | None:
        """Return the fraction of all answered images with another label; None for a task without labels."""
        if not self.has_labels:
            return None
        return self._fraction([row.before.label != row.after.label for row in self.sample])

    def _fraction(self, hits: Sequence[bool]) -> Fraction:
        weights = np.array([row.weight for row in self.sample], dtype=np.float64)
        value = float(weights[np.array(hits, bool)].sum() / weights.sum())
        return Fraction(sum(hits), value, weighted_interval(hits, weights, level=0.95))

    def moves(self) -> list[Moves]:
        """Return how far the numbers in these rows moved."""
        return self._moves(np.ones(len(self.rows)))

    def sampled_moves(self) -> list[Moves]:
        """Return how far the numbers in all answers moved; the largest move is that of the sample itself."""
        return self._moves(np.array([row.weight or 0.0 for row in self.rows]))

    def _moves(self, weights: npt.NDArray[np.float64]) -> list[Moves]:
        found = []
        for name, distances in self.distances.items():
            counted = (weights > 0) & ~np.isnan(distances)
            if counted.any():
                some = distances[counted]
                found.append(Moves(name, len(some), weighted_median(some, weights[counted]), float(some.max())))
        return found

    def flips(self) -> Iterator[tuple[str, str, list[Replayed]]]:
        """Yield each change with its images: now rejected ones most typical first, accepted ones most unusual first."""
        for before in self.decisions:
            for after in self.decisions:
                found = [row for row in self.rows if (row.before.decision, row.after.decision) == (before, after)]
                if before == after or not found:
                    continue
                found.sort(key=lambda row: row.ood_score, reverse=after == ACCEPT)
                yield before, after, list({row.position: row for row in found}.values())[:SHOWN_IMAGES]

    def to_json(self) -> dict[str, Any]:
        """Return the tables and fractions as JSON types, and say for which images they hold."""
        pairs = [(before, after) for before in self.decisions for after in self.decisions]
        document: dict[str, Any] = {
            "model": self.name,
            "bundle_version": self.version,
            "days": list(self.days),
            **self.task.model_dump(),
            "stored_images": {
                "of": "the logged images themselves",
                "rows": len(self.rows),
                "table": [{"before": b, "after": a, "rows": self.count(b, a)} for b, a in pairs],
                **_moves_json(self.moves()),
            },
        }
        if self.sample:
            document["all_images"] = {
                "of": "all answered images, by the random sample, 95 % intervals",
                "rows": len(self.sample),
                "flipped": _json(self.flipped()),
                **({"relabelled": _json(relabelled)} if (relabelled := self.relabelled()) else {}),
                "table": [{"before": b, "after": a, **_json(self.fraction(b, a))} for b, a in pairs],
                **_moves_json(self.sampled_moves()),
            }
        return document


def _json(fraction: Fraction) -> dict[str, Any]:
    return {"rows": fraction.rows, "fraction": fraction.value, "interval": list(fraction.interval)}


def _moves_json(moves: Sequence[Moves]) -> dict[str, Any]:
    return {"moves": [asdict(each) for each in moves]} if moves else {}


def replay(
    log: Log, model: FittedModel, name: str | None = None, *, since: str | None = None, until: str | None = None
) -> Replay:
    """Answer the logged images of a log again, under the policy of a bundle."""
    name = logged_model(log, name)
    days = days_of(log, name, since=since, until=until)
    rows, paths, logged = _logged(log, name, days, model.score_names)
    if not rows:
        raise UsageError(f"{log.where} has no logged images of {name}; see --log-images and --log-sample of psc-serve")
    source, labels = LoggedImages(log, paths), torch.zeros(len(paths), dtype=torch.int64)
    images = label_images(f"the log {log.where}", model.classes, source, labels, model.preprocess)
    outputs = model.outputs(dataset_outputs(model, images, "replay").packed.numpy())
    scores, task, decisions = outputs["ood_score"].tolist(), model.task, model.decide(outputs)
    codes = zip(decisions.decision.tolist(), decisions.labels(model.classes), strict=True)
    answers = [Decided(task.decision_names()[code], label) for code, label in codes]
    replayed = [Replayed(before, answers[at], scores[at], weight, at) for before, weight, at in rows]
    before, after, position = task.numbers(logged), task.numbers(outputs), [at for *_, at in rows]
    distances = {name: np.abs(after[name][position] - before[name]) for name in after}
    period = (days[0], days[-1])
    return Replay(name, model.version, period, replayed, images, task.decision_names(), task, distances)


def _logged(
    log: Log, name: str, days: Sequence[str], scores: Sequence[str]
) -> tuple[list[tuple[Decided, float | None, int]], list[str], Outputs[FloatArray]]:
    """Return each row of an intact image as answer, weight and position of it, all paths, and scores, NaN if absent."""
    answers: dict[tuple[str, str | None], Decided] = {}
    weights: dict[float, float] = {}
    at: dict[str, int] = {}
    rows: list[tuple[Decided, float | None, int]] = []
    logged = [np.empty((0, len(scores)), np.float32)]
    for batch in read_rows(log, name, days=days, columns=[*_COLUMNS, *scores]):
        stored = np.zeros(batch.num_rows, bool)
        cells = zip(*(batch[column].to_pylist() for column in _COLUMNS), strict=True)
        for index, (sha256, path, label, decision, is_sampled, probability) in enumerate(cells):
            stored[index] = is_stored(sha256, path)
            if stored[index]:
                before = answers.setdefault((decision, label), Decided(decision, label and compose(label)))
                weight = weights.setdefault(probability, 1 / probability) if is_sampled else None
                rows.append((before, weight, at.setdefault(path, len(at))))
        absent = np.full(batch.num_rows, np.nan, np.float32)
        known = {*batch.schema.names}
        columns = [batch[score].to_numpy(zero_copy_only=False) if score in known else absent for score in scores]
        logged.append(np.stack(columns, axis=1)[stored])
    intact = np.array(are_intact(log, list(at)), bool)
    position, kept = intact.cumsum() - 1, [bool(intact[each]) for *_, each in rows]
    rows = [(before, weight, int(position[each])) for before, weight, each in compress(rows, kept)]
    return rows, list(compress(at, intact)), Outputs(np.concatenate(logged)[kept], scores, ())
