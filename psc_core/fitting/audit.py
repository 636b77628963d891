"""Read the audit slice of a prediction log as a data set: a random sample of images, with people's verdicts.

The input is the rows and labels of a log; the output is an :class:`Audit` of n labelled images and the weight (n,) of
each, the inverse of the probability that it was drawn with.

The slice is random, but people may have reviewed only a part of it, and a part that was chosen for what it looks like
is no random sample.  So the images of each day are taken in the order of their digests, which is as good as random and
is the order in which ``psc-log review`` gives them, up to where fewer than :data:`REVIEWED` of them have a verdict.  An
image counts once, however often it was sent: copies would pretend to be more images than there are.

The verdict decides what an image is used for:

* a class (or a number): the image is in-distribution, and these images alone calibrate;
* none of the classes: the image is out-of-distribution and calibrates nothing;
* nobody can tell: the image calibrates nothing either.  It has no label that a prediction set could contain, and
  whether the model should know it is unknown.  The rates therefore hold for images that a person can put into a class.
  Ambiguous images tend to be unusual, so a new one raises the alarm more often than α; every calibration says how
  many there are, and how many of them raise it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import groupby
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.calibration.weighted import effective_count
from psc_core.data.dataset import ImageDataset, labelled
from psc_core.errors import UsageError
from psc_core.log.labels import CANNOT_TELL, LABEL, NONE_OF_THE_CLASSES, joined, read_labels
from psc_core.log.rows import days_of, logged_model, read_rows
from psc_core.log.schema import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, arrow
from psc_core.log.source import LoggedImages, is_stored
from psc_core.log.store import Log
from psc_core.model.base import FittedModel
from psc_core.tasks.fit.task import task_fit

REVIEWED: Final = 0.95
"""Fraction of a day's images, up to the last that counts, that must have a verdict."""

_COLUMNS: Final = ("time", REQUEST_ID, IMAGE_INDEX, SHA256, IMAGE_PATH, "audit_probability")


@dataclass(frozen=True)
class LoggedVerdict:
    """A logged image, with the last verdict on it."""

    day: date  # of its first row
    sha256: str
    path: str
    probability: float  # of being drawn into the slice
    verdict: str | None  # one of :data:`psc_core.log.labels.VERDICTS`; None until somebody reviews it
    label: str | None
    verdict_time: datetime | None = None


@dataclass(frozen=True)
class Audit:
    """The reviewed part of an audit slice."""

    of_class: ImageDataset  # the images that show a class or have a number, labelled, in the order of their digests
    weights: Float[Tensor, " n"]  # how many images each of these stands for
    others: Mapping[str, ImageDataset]  # the images with another verdict, by verdict; their labels mean nothing
    days: tuple[str, str]  # first and last day of the slice, ``YYYY-MM-DD``
    logged: int  # number of logged images of the slice, reviewed or not

    def summary(self) -> str:
        """Return a sentence that counts the images by verdict."""
        reviewed = len(self.of_class) + sum(map(len, self.others.values()))
        others = "".join(f", {len(images)} {verdict}" for verdict, images in self.others.items())
        equal = effective_count(self.weights)
        counts = f", which count as {equal} drawn equally" if equal < len(self.of_class) else ""
        return (
            f"audit slice from {self.days[0]} to {self.days[1]}: {self.logged} logged images, {reviewed} reviewed: "
            f"{len(self.of_class)} of a class{counts}{others}"
        )

    def at(self, positions: Tensor) -> Audit:
        """Return the audit with only the images of a class at these ``positions``."""
        return replace(self, of_class=self.of_class.subset(positions), weights=self.weights[positions])


def read_audit(
    log: Log, model: FittedModel, name: str | None = None, *, since: str | None = None, until: str | None = None
) -> Audit:
    """Return the reviewed part of the audit slice.

    Args:
        log: The prediction log of a service.
        model: The model that has the labels' classes; rows that other versions of it wrote count too.
        name: The name that it was served by; None where the log has only one.
        since: First day, ``YYYY-MM-DD``; None for the first in the log.
        until: Last day, ``YYYY-MM-DD``; None for the last in the log.

    Raises:
        UsageError: If the log has no audit images, or too few of them are reviewed.
        DataError: If a file is damaged, or a label is no class of the model.
    """
    name = logged_model(log, name)
    days = days_of(log, name, since=since, until=until)
    rows = read_rows(log, name, audit=True, days=days, columns=list(_COLUMNS))
    logged = images_of(joined(rows, read_labels(log), name))
    if not logged:
        span = f" from {days[0]} to {days[-1]}" if days else ""
        raise UsageError(f"{log.where} has no logged audit images of {name}{span}; serve with --log-audit")
    reviewed = reviewed_of(logged)
    if not any(image.verdict == LABEL for image in reviewed):
        raise UsageError(
            f"of the {len(logged)} audit images of {name} in {log.where}, each day's in the order of their digests, "
            f"{len(reviewed)} are reviewed and none of them has a label; label those of psc-log review --audit: others "
            "were chosen for what they look like, and no rate comes from them"
        )
    return _audit(log, model, reviewed, days, len(logged))


def read_outside(
    log: Log, model: FittedModel, name: str | None = None, *, since: str | None = None, until: str | None = None
) -> ImageDataset:
    """Return the logged images outside the audit slice whose verdict is a label, each once, labelled.

    An image whose bytes are also in the slice belongs to the slice.

    Args:
        log: See :func:`read_audit`, also for the other arguments.
        model: The model that has the labels' classes.
        name: The name that it was served by.
        since: First day.
        until: Last day.

    Raises:
        UsageError: If there are no such images.
        DataError: If a file is damaged, or a label is no class of the model.
    """
    name = logged_model(log, name)
    days = days_of(log, name, since=since, until=until)
    audit, others = set(), []
    for batch in joined(read_rows(log, name, days=days, columns=[*_COLUMNS, "audit"]), read_labels(log), name):
        is_audit = batch["audit"].to_pylist()
        audit |= {sha256 for sha256, of_slice in zip(batch[SHA256].to_pylist(), is_audit, strict=True) if of_slice}
        others.append(batch.filter(arrow().array([not of_slice for of_slice in is_audit])))
    logged = [image for image in images_of(others) if image.sha256 not in audit]
    if not (of_class := [image for image in logged if image.verdict == LABEL]):
        reviewed = sum(image.verdict is not None for image in logged)
        raise UsageError(
            f"of the {len(logged)} logged images of {name} in {log.where} outside the audit slice {reviewed} are "
            "reviewed and none of them has a label; label some (psc-log review without --audit), or leave out "
            "--extend-density: images of the slice calibrate, so they extend nothing"
        )
    return _labelled(log, model, sorted(of_class, key=lambda image: image.sha256))


def images_of(rows: Iterable[Any]) -> list[LoggedVerdict]:
    """Return each logged image of the rows once, with the latest verdict on any of its rows."""
    found: dict[str, LoggedVerdict] = {}
    for batch in rows:
        for row in batch.to_pylist():
            sha256, path = row[SHA256], row[IMAGE_PATH]
            if not is_stored(sha256, path):
                continue
            before = found.get(sha256)
            verdict, label, time = row["verdict"], row["true_label"], row["verdict_time"]
            if before and before.verdict_time and (time is None or before.verdict_time > time):
                verdict, label, time = before.verdict, before.label, before.verdict_time
            probability = max(row["audit_probability"], before.probability if before else 0.0)
            day = before.day if before else row["time"].date()
            found[sha256] = LoggedVerdict(day, sha256, path, probability, verdict, label, time)
    return list(found.values())


def reviewed_of(images: Iterable[LoggedVerdict]) -> list[LoggedVerdict]:
    """Return the reviewed images that count: each day's, up to where :data:`REVIEWED` of the images so far are."""
    ordered = sorted(images, key=lambda image: (image.day, image.sha256))
    found: list[LoggedVerdict] = []
    for _, of_day in groupby(ordered, key=lambda image: image.day):
        day = list(of_day)
        has_verdict = np.array([image.verdict is not None for image in day])
        enough = has_verdict.cumsum() >= REVIEWED * np.arange(1, len(day) + 1)
        end = int(enough.nonzero()[0].max()) + 1 if enough.any() else 0
        found += [image for image in day[:end] if image.verdict is not None]
    return found


def _audit(log: Log, model: FittedModel, reviewed: Sequence[LoggedVerdict], days: Sequence[str], logged: int) -> Audit:
    by_verdict = {
        verdict: [i for i in reviewed if i.verdict == verdict] for verdict in (NONE_OF_THE_CLASSES, CANNOT_TELL)
    }
    # In the order of their digests over all days: a part of them is as random a sample as the whole.
    of_class = sorted((image for image in reviewed if image.verdict == LABEL), key=lambda image: image.sha256)
    return Audit(
        _labelled(log, model, of_class),
        torch.tensor([1 / image.probability for image in of_class], dtype=torch.float64),
        {verdict: _data(log, model, images) for verdict, images in by_verdict.items() if images},
        (days[0], days[-1]),
        logged,
    )


def _labelled(log: Log, model: FittedModel, images: Sequence[LoggedVerdict]) -> ImageDataset:
    """Return images whose verdict is a label, a class or a number, labelled with it."""
    said = [str(image.label) for image in images]
    return task_fit(model.task.name).relabelled(model.task, _data(log, model, images), said)


def _data(log: Log, model: FittedModel, images: Sequence[LoggedVerdict]) -> ImageDataset:
    source = LoggedImages(log, [image.path for image in images])
    labels = torch.zeros(len(images), dtype=torch.int64)
    return labelled(f"images of {log.where}", model.classes, source, labels, model.preprocess)
