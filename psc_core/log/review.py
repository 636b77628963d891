"""Choose and order logged images for people to review.

:func:`review` mixes four lists, which take turns, each image once: the random sample, the newest day first and each day
in the order of digests, so that its reviewed part is a random sample too (:mod:`psc_core.log.sample`); images near a
threshold, by the number of images between; the most unusual images, by OOD score; and diverse images, each the one
farthest, in standardised scores and probabilities, from all chosen before.  Only the first list is a fair sample.

A page shows the newest images, and how many accepted answers were right: of the random sample alone.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import chain, groupby, zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.answers import ACCEPT
from psc_core.log import store
from psc_core.log.labels import (
    CANNOT_TELL,
    LABEL,
    Labels,
    is_cluster,
    label_files,
    label_keys,
    read_label_file,
    row_keys,
)
from psc_core.log.store import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, Log

MAX_CANDIDATES: Final = 100_000  # maximum number of a model's images that are considered, the newest ones
SAMPLE, NEAR, UNUSUAL, DIVERSE = "sampled", "near a threshold", "unusual", "diverse"
FloatMatrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReviewImage:
    """A logged image that nobody has labelled yet."""

    model: str
    row: Mapping[str, Any]  # its columns without scores and probabilities
    reason: str = ""  # the list from which it was chosen

    @property
    def is_sampled(self) -> bool:
        """True for an image of the random sample, whatever list it was chosen from."""
        return bool(self.row["sampled"])


def review(
    log: Log, labels: Labels, *, model: str | None = None, sampled: bool = False, limit: int = 200
) -> list[ReviewImage]:
    lists: list[Iterable[ReviewImage]] = []
    for name in store.models_in(log) if model is None else [store.logged_model(log, model)]:
        groups = _groups(log, labels, name, sampled)
        if sampled:  # of all bundles together, as their images calibrate together
            images = sorted(chain.from_iterable(images for images, *_ in groups), key=_newest_day)
            lists.append(replace(each, reason=SAMPLE) for each in images)
        else:
            lists += (_ordered(log, *group) for group in groups)
    found: dict[tuple[str, str], ReviewImage] = {}
    for each in filter(None, chain.from_iterable(zip_longest(*lists))):
        found.setdefault((each.model, each.row[SHA256]), each)
        if len(found) >= limit:
            break
    return [*found.values()]


def _groups(
    log: Log, labels: Labels, model: str, sampled: bool
) -> list[tuple[list[ReviewImage], list[str], FloatMatrix]]:
    """Return the candidates of each bundle of a model, the names of their scores, and scores with probabilities."""
    rows: dict[tuple[str, ...], list[ReviewImage]] = defaultdict(list)
    values: dict[tuple[str, ...], list[FloatMatrix]] = defaultdict(list)
    found = 0
    for batch in store.read_rows(log, model, sampled=sampled, days=store.days_of(log, model)[::-1]):
        scores = store.scores_in(batch.schema)
        batch = batch.filter(batch[IMAGE_PATH].is_valid())
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        is_open = [labels.of(model, *key) is None for key in keys]
        batch = batch.filter(store.arrow().array(is_open, store.arrow().bool_()))
        if not batch.num_rows:
            continue
        columns = [batch[name].to_numpy(zero_copy_only=False) for name in scores]
        if not batch["probabilities"].null_count:
            columns += list(batch["probabilities"].flatten().to_numpy().reshape(batch.num_rows, -1).T)
        plain = batch.select([name for name in batch.schema.names if name not in {*scores, "probabilities", "checks"}])
        key = (batch["bundle_version"][0].as_py(), *scores)
        rows[key] += [ReviewImage(model, row) for row in plain.to_pylist()]
        values[key].append(np.stack(columns, axis=1).astype(np.float64))
        found += batch.num_rows
        if found >= MAX_CANDIDATES:
            break
    return [(rows[key], list(key[1:]), np.concatenate(values[key])) for key in rows]


def _newest_day(image: ReviewImage) -> tuple[int, str]:
    return -image.row["time"].toordinal(), image.row[SHA256]


def _ordered(log: Log, candidates: list[ReviewImage], scores: list[str], values: FloatMatrix) -> Iterator[ReviewImage]:
    """Yield each candidate of a group once, with the list from which it was chosen."""
    slice_ = [at for at, each in enumerate(candidates) if each.is_sampled]
    slice_.sort(key=lambda at: _newest_day(candidates[at]))
    limits = store.read_model(log, candidates[0].row["bundle_version"]).task.limits
    lists = {
        SAMPLE: iter(slice_),
        NEAR: iter(np.argsort(_ranks_between(candidates, scores, values, limits), kind="stable").tolist()),
        UNUSUAL: iter(np.argsort(-values[:, scores.index("ood_score")], kind="stable").tolist()),
    }
    deviation = values.std(axis=0)
    points = (values - values.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    squared = np.einsum("nd,nd->n", points, points)
    distance = np.full(len(points), np.inf)  # squared, to the nearest chosen point
    chosen = np.zeros(len(points), bool)
    while not chosen.all():
        for reason in (*lists, DIVERSE):
            if reason == DIVERSE:
                at = int(np.where(chosen, -1.0, distance).argmax())
            else:
                at = next((each for each in lists[reason] if not chosen[each]), -1)
            if at < 0 or chosen[at]:
                continue
            chosen[at] = True
            # ‖x − a‖² as one product of matrix and vector: a difference from all points would be another matrix.
            np.minimum(distance, squared + squared[at] - 2 * (points @ points[at]), out=distance)
            yield ReviewImage(candidates[at].model, candidates[at].row, reason)


def _ranks_between(
    candidates: list[ReviewImage], scores: list[str], values: FloatMatrix, limits: Mapping[str, str]
) -> npt.NDArray[np.float64]:
    """Return the number of candidates between an image's score and its threshold, the smallest over all thresholds."""
    policies = [json.loads(each.row["policy"]) for each in candidates]
    ranks = np.full(len(candidates), np.inf)
    for threshold, score in limits.items():
        column = values[:, scores.index(score)]
        in_order = np.sort(column)
        at = np.array([np.nan if policy.get(threshold) is None else policy[threshold] for policy in policies])
        between = np.abs(np.searchsorted(in_order, column) - np.searchsorted(in_order, at))
        ranks = np.fmin(ranks, np.where(np.isnan(at), np.inf, between))
    return ranks


def path_prefix(log: Log) -> str:
    """Return the prefix with which an image's path is that of its file, from where the log was named."""
    return f"{log.where.rstrip('/')}/"


def label_studio_prefix(log: Log) -> str:
    """Return the prefix with which Label Studio shows the images: its URL of local files, or the bucket."""
    return "/data/local-files/?d=" if log.is_folder else path_prefix(log)


def to_label_studio(candidates: Sequence[ReviewImage], prefix: str) -> str:
    """Return Label Studio tasks, with the model's label as prediction; they sort by the prediction's score."""
    tasks = []
    for position, each in enumerate(candidates):
        label = each.row["label"]
        choice = {"from_name": "label", "to_name": "image", "type": "choices", "value": {"choices": [label]}}
        prediction: dict[str, Any] = {
            "model_version": each.row["bundle_version"],
            "score": position / len(candidates),
            "result": [] if label is None else [choice],
        }
        tasks.append({"data": _data(each, prefix), "predictions": [prediction]})
    return json.dumps(tasks, ensure_ascii=False, indent=1)


_FORMULA: Final = ("=", "+", "-", "@", "\t", "\r")  # what one begins with


def to_csv(candidates: Sequence[ReviewImage], prefix: str) -> str:
    """Return a CSV line for each image, with an empty ``label`` to fill in and the model's class as ``predicted``.

    Numbers are reviewed blind, so without that: a number that is seen draws the one that is given towards it.
    """
    file = io.StringIO()
    rows = [{**_data(each, prefix), "label": ""} for each in candidates]
    for row in rows:  # A spreadsheet would take such a class, of which a bundle may have any, for a formula.
        if row.get("predicted", "").startswith(_FORMULA):
            row["predicted"] = f"'{row['predicted']}"
    names = max(map(list, rows), key=len) if rows else [REQUEST_ID, IMAGE_INDEX, SHA256, "label"]
    lines = csv.DictWriter(file, names)
    lines.writeheader()
    lines.writerows(rows)
    return file.getvalue()


def _data(each: ReviewImage, prefix: str) -> dict[str, Any]:
    row = each.row
    return {
        "image": prefix + row[IMAGE_PATH],
        REQUEST_ID: row[REQUEST_ID],
        IMAGE_INDEX: row[IMAGE_INDEX],
        SHA256: row[SHA256],
        "model": each.model,
        **({} if row["label"] is None else {"predicted": row["label"]}),
        "decision": row["decision"],
        "reason": each.reason,
        "sampled": each.is_sampled,
    }


_CHUNK: Final = 500  # maximum number of rows that are converted to Python objects at a time
_FILES: Final = 200  # maximum number of files of labels that are read at a time
_Label = tuple[datetime, str, str | None]  # its time, kind and label


@dataclass(frozen=True)
class Unreviewed:
    """A logged image that nobody has reviewed or named yet."""

    model: str
    row: dict[str, Any]  # its columns without scores
    scores: Mapping[str, float]
    file: str  # with its row
    name: str | None = None  # that of its cluster, if people reviewed it


class ReviewQueue:
    """Finds these images, and reads each file of labels once, since a service writes one for each; not thread-safe."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._read: set[str] = set()
        self._last: dict[int, _Label] = {}  # by the hashes of the keys of reviewed images
        self._clustered: set[str | None] = set()  # the digests of the images that a cluster has named
        self.back_to: date | None = None  # the day that the last search came to when its time was over, if it was

    def newest(self, limit: int, seconds: float, decisions: Sequence[str], model: str | None) -> list[Unreviewed]:
        """Return the newest unreviewed images, each once; after so many ``seconds`` no further file is opened.

        Then :attr:`back_to` says how far back those are that were searched, as it does of :meth:`checked`.
        """
        self._read_labels(ends := time.monotonic() + seconds)
        found: dict[str, Unreviewed] = {}
        for each in self._stored(ends, decisions, model):
            if self._label(each) is None and store.is_stored(each.row[SHA256], each.row[IMAGE_PATH]):
                found.setdefault(each.row[SHA256], each)
            if len(found) >= limit:
                break
        return self._with_probabilities([*found.values()])

    def to_name(self, limit: int, seconds: float, model: str | None) -> list[Unreviewed]:
        """Return the images that only a cluster has named, cluster by cluster, the largest first, as :meth:`newest`."""
        self._read_labels(ends := time.monotonic() + seconds)
        self.back_to = None
        if not self._clustered and time.monotonic() <= ends:  # Later, some labels may not have been read.
            return []
        clusters = defaultdict[tuple[str, str | None], dict[str, Unreviewed]](dict)
        for each in self._stored(ends, [], model):
            _, kind, name = self._label(each) or (None, None, None)
            if is_cluster(kind, name) and store.is_stored(each.row[SHA256], each.row[IMAGE_PATH]):
                clusters[each.model, name].setdefault(each.row[SHA256], replace(each, name=name))
        largest = sorted(clusters.values(), key=len, reverse=True)
        return self._with_probabilities([each for of in largest for each in of.values()][:limit])

    def _with_probabilities(self, found: list[Unreviewed]) -> list[Unreviewed]:
        """Add the probabilities, thousands for some models, which are read for these images alone."""
        rows = {(each.row[REQUEST_ID], each.row[IMAGE_INDEX]): each.row for each in found}
        wanted = store.arrow().dataset.field(REQUEST_ID).isin([request_id for request_id, _ in rows])
        for name in {each.file for each in found}:
            for batch in store.rows_of_file(self._log, name, wanted, [REQUEST_ID, IMAGE_INDEX, "probabilities"]):
                for *key, probabilities in zip(*(column.to_pylist() for column in batch), strict=True):
                    rows.get(tuple(key), {})["probabilities"] = probabilities
        return found

    def checked(self, model: str, version: str, since: datetime, seconds: float) -> tuple[int, int]:
        """Return how many accepted images of the random sample people could label, and how many answers were right."""
        self._read_labels(ends := time.monotonic() + seconds)
        found: dict[str, bool] = {}
        for each in self._stored(ends, [ACCEPT], model, since.date()):
            if each.row["time"] < since:
                break
            last = self._label(each)
            _, kind, label = last or (None, CANNOT_TELL, None)
            if kind != CANNOT_TELL and each.row["bundle_version"] == version and each.row["label"] is not None:
                # A name from before, given to another row of the image, may be of a class that was added since.
                names = kind != LABEL and last == self._last.get(hash((each.row[REQUEST_ID], each.row[IMAGE_INDEX])))
                found.setdefault(each.row[SHA256], label == each.row["label"] and not names)
        return len(found), sum(found.values())

    def _stored(
        self, ends: float, decisions: Sequence[str], model: str | None, first: date = date.min
    ) -> Iterator[Unreviewed]:
        """Yield images with these decisions, of accepted ones a sample, or else of clusters; the last files first."""
        pa: Any = store.arrow()
        ds, self.back_to = pa.dataset, None
        wanted = ds.field("decision").isin(decisions) & ((ds.field("decision") != ACCEPT) | ds.field("sampled"))
        wanted = wanted if decisions else ds.field(SHA256).isin(pa.array(self._clustered, pa.string()))
        wanted &= ds.field(IMAGE_PATH).is_valid() & ds.field(SHA256).is_valid()
        for name, of in _files(self._log):
            if (day := date.fromisoformat(name.partition("/day=")[2][:10])) < first:
                return
            if time.monotonic() > ends:
                self.back_to = day
                return
            if model not in (None, of):
                continue
            if not (batches := list(store.rows_of_file(self._log, name, wanted, without="probabilities"))):
                continue
            table = pa.Table.from_batches(batches).sort_by([("time", "descending")])
            scores = store.scores_in(table.schema)
            for start in range(0, len(table), _CHUNK):
                rows = table.slice(start, _CHUNK).to_pylist()
                yield from (Unreviewed(of, row, {score: row.pop(score) for score in scores}, name) for row in rows)

    def _label(self, image: Unreviewed) -> _Label | None:
        keys = row_keys(image.model, *(image.row[name] for name in (REQUEST_ID, IMAGE_INDEX, SHA256)))
        return max((self._last[key] for key in map(hash, keys) if key in self._last), default=None)

    def _read_labels(self, ends: float) -> None:
        """Read the files of labels that have not been read yet, the newest first."""
        files = sorted(label_files(self._log), key=lambda each: each[1], reverse=True)
        new = [name for name, _ in files if name not in self._read]
        for start in range(0, len(new), _FILES):
            if time.monotonic() > ends:
                return
            names = new[start : start + _FILES]
            for sha256, key, label in _labels(self._log, names):
                self._last[key] = max(label, self._last.get(key, label))
                if is_cluster(*label[1:]):
                    self._clustered.add(sha256)
            self._read.update(names)


def _files(log: Log) -> Iterator[tuple[str, str]]:
    """Yield the files of rows with their models, the files that were written last first."""
    days = sorted({(day, model) for model in store.models_in(log) for day in store.days_of(log, model)}, reverse=True)
    for _, group in groupby(days, lambda each: each[0]):
        places = ((f"model={model}/day={day}", model) for day, model in group)
        files = [(written, name, of) for place, of in places for name, written in log.names(place, suffix=".parquet")]
        yield from ((name, model) for _, name, model in sorted(files, reverse=True))


def _labels(log: Log, names: Sequence[str]) -> Iterator[tuple[str | None, int, _Label]]:
    pa: Any = store.arrow()
    try:
        paths = [log.path(name) for name in names]
        files = pa.dataset.dataset(paths, filesystem=log.files, format="parquet", schema=store.label_schema())
        labels = files.to_table(columns=["model", REQUEST_ID, IMAGE_INDEX, SHA256, "time", "kind", "label"])
    except (pa.ArrowException, OSError):
        for name in names:
            read_label_file(log, name)  # It names a damaged file.
        raise
    for *named, at, kind, label in zip(*(column.to_pylist() for column in labels), strict=True):
        yield from ((named[-1], hash(key), (at, kind, label)) for key in label_keys(*named))
