"""Choose and order logged images for people to review: the most informative ones, mixed with the audit slice.

Four lists take turns, and each image appears once: the audit slice, the newest day first and each day in the order of
digests, so that its reviewed part is a random sample too (:mod:`psc_core.fitting.audit`); images near a threshold, by
the number of images between; the most anomalous images, by OOD score; and diverse images, each the one farthest, in
standardised scores and probabilities, from all chosen before.  Only the first list is a fair sample.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice, zip_longest
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from psc_core.log.labels import Labels
from psc_core.log.models import read_model
from psc_core.log.rows import days_of, models_in, read_rows
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, arrow, scores_in
from psc_core.log.store import Log

MAX_CANDIDATES: Final = 100_000
"""Maximum number of a model's images that are considered, the newest ones."""

AUDIT, NEAR, ANOMALOUS, DIVERSE = "audit", "near a threshold", "strange", "diverse"

FloatMatrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ReviewImage:
    """A logged image that nobody has labelled yet."""

    model: str
    row: Mapping[str, Any]  # its columns without scores and probabilities
    reason: str = ""  # the list from which it was chosen

    @property
    def is_audit(self) -> bool:
        """True for an image of the audit slice, whatever list it was chosen from."""
        return bool(self.row["audit"])


def review(
    log: Log, labels: Labels, *, model: str | None = None, audit: bool = False, limit: int = 200
) -> list[ReviewImage]:
    """Return the images to review, in order.

    Args:
        log: The log.
        labels: The labels given so far.
        model: Review only this model's images; None takes the models in turn.
        audit: Review only the audit slice.
        limit: Maximum number of images.

    Raises:
        DataError: If a file of the log is damaged.
        OSError: If the log cannot be read.
    """
    names = models_in(log) if model is None else [model]
    groups = chain.from_iterable(_groups(log, labels, name, audit) for name in names)
    turns = zip_longest(*(_ordered(log, *group, audit) for group in groups))
    seen: set[str] = set()
    return list(islice(_once((each for turn in turns for each in turn if each is not None), seen), limit))


def _once(candidates: Iterator[ReviewImage], seen: set[str]) -> Iterator[ReviewImage]:
    for each in candidates:
        if each.row[SHA256] not in seen:
            seen.add(each.row[SHA256])
            yield each


def _groups(
    log: Log, labels: Labels, model: str, audit: bool
) -> list[tuple[list[ReviewImage], list[str], FloatMatrix]]:
    """Return the candidates of each bundle of a model, the names of their scores, and scores with probabilities."""
    rows: dict[tuple[str, ...], list[ReviewImage]] = defaultdict(list)
    values: dict[tuple[str, ...], list[FloatMatrix]] = defaultdict(list)
    found = 0
    for batch in read_rows(log, model, audit=audit, days=days_of(log, model)[::-1]):
        scores = scores_in(batch.schema)
        batch = batch.filter(batch[IMAGE_PATH].is_valid())
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        batch = batch.filter(arrow().array([labels.of(model, *key) is None for key in keys], arrow().bool_()))
        if not batch.num_rows:
            continue
        columns = [batch[name].to_numpy(zero_copy_only=False) for name in scores]
        if not batch["probabilities"].null_count:
            columns += list(batch["probabilities"].flatten().to_numpy().reshape(batch.num_rows, -1).T)
        plain = batch.select([name for name in batch.schema.names if name not in {*scores, "probabilities", "gates"}])
        key = (batch["bundle_version"][0].as_py(), *scores)
        rows[key] += [ReviewImage(model, row) for row in plain.to_pylist()]
        values[key].append(np.stack(columns, axis=1).astype(np.float64))
        found += batch.num_rows
        if found >= MAX_CANDIDATES:
            break
    return [(rows[key], list(key[1:]), np.concatenate(values[key])) for key in rows]


def _ordered(
    log: Log, candidates: list[ReviewImage], scores: list[str], values: FloatMatrix, audit: bool
) -> Iterator[ReviewImage]:
    """Yield each candidate of a group once, with the list from which it was chosen."""
    slice_ = [at for at, each in enumerate(candidates) if each.is_audit]
    slice_.sort(key=lambda at: str(candidates[at].row[SHA256]))
    slice_.sort(key=lambda at: candidates[at].row["time"].date(), reverse=True)
    if audit:
        yield from (ReviewImage(candidates[at].model, candidates[at].row, AUDIT) for at in slice_)
        return
    limits = read_model(log, candidates[0].row["bundle_version"]).task.limits
    lists = {
        AUDIT: iter(slice_),
        NEAR: iter(np.argsort(_ranks_between(candidates, scores, values, limits), kind="stable").tolist()),
        ANOMALOUS: iter(np.argsort(-values[:, scores.index("ood_score")], kind="stable").tolist()),
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
