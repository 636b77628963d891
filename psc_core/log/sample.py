"""Read the reviewed part of a log's random sample, and the labelled images outside it.

People may have reviewed images of the random sample that they chose for their looks, and these are
random no longer.  So the images of each day are taken in the order of their digests, which is as good as random and is
the order of ``psc-log review``, up to where fewer than :data:`REVIEWED` of them have a label.

A day may go on after its images were listed, and what came later is no gap in the list.  So only the images up to a
time are asked for labels, that of the labelled image up to which most labels count.  Neither digests nor times nor who
was asked depend on what an image shows, so those that count are random among the day's images up to then.  Where fewer
than half of a day's labels count at any time, images were chosen, and a time that suits the labels would let some of
them in: then it is that of the last labelled one.

Of images that were chosen, some days' first ones happen to be among them, and over months these days would add up.  So
a day that is not reviewed as a whole counts only if labels placed at random on its images would rarely be as many on
those that are asked for them.  :data:`LUCK` is of one such set of images, and the best of several is taken, so that a
few in 1,000 days of labels at random count.  Of a day with one or two images no order can tell how they were chosen.

Those that count stand for the whole day, also for what came later: where they are a share s of all its images, the
probability to have drawn and reviewed one is s times that to have drawn it.  A day of which little is reviewed would
weigh so much that the others hardly counted.  So the days with the largest shares count, as many of them as make the
effective number of images largest; labels do not decide that.  An image counts once, however often it was sent.

Images labelled with a class (or a number) calibrate; none of the classes means out of distribution.  Where nobody can
tell, the image has no label that a prediction set could contain, so the rates hold for images that a person can put
into a class.  Ambiguous images tend to be unusual, so they raise the alarm more often than α; every calibration says
how many there are, and how many of them raise it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from itertools import compress, groupby
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from jaxtyping import Float
from torch import Tensor

from psc_core.conformal import effective_count
from psc_core.data.dataset import ImageDataset, label_images
from psc_core.errors import UsageError
from psc_core.log import store
from psc_core.log.labels import CANNOT_TELL, LABEL, NONE_OF_THE_CLASSES, is_cluster, join_labels, read_labels
from psc_core.log.store import IMAGE_INDEX, IMAGE_PATH, REQUEST_ID, SHA256, Log
from psc_core.model import FittedModel

REVIEWED: Final = 0.95  # fraction of a day's images, up to the last that counts, that must have a label
LUCK: Final = 0.001  # maximum probability that labels placed at random look like those of people who start at the top

_SERVE_LESS: Final = "serve with a lower --log-sample, and label images outside of it"
_COLUMNS: Final = ("time", REQUEST_ID, IMAGE_INDEX, SHA256, IMAGE_PATH, "sample_probability")


@dataclass(frozen=True)
class LoggedLabel:
    """A logged image, with the last label on it."""

    time: datetime  # of its first row, UTC
    sha256: str
    path: str
    probability: float  # of being drawn into the random sample; of one that counts, of being reviewed too
    kind: str | None  # one of :data:`psc_core.log.labels.LABEL_KINDS`; None until somebody reviews it
    label: str | None  # None too for the name of a cluster, which nobody gave
    label_time: datetime | None = None

    @property
    def day(self) -> date:
        return self.time.date()


@dataclass(frozen=True)
class Sample:
    """The reviewed part of a random sample."""

    of_class: ImageDataset  # the images that show a class or have a number, labelled, in the order of their digests
    weights: Float[Tensor, " n"]  # how many images each of these stands for
    others: Mapping[str, ImageDataset]  # the images of another kind, by kind; their labels mean nothing
    days: tuple[str, str]  # first and last day of the random sample, ``YYYY-MM-DD``
    logged: int  # number of logged images of the random sample, reviewed or not
    labelled: int = 0  # number of those with a label, whether they count or not
    left_out: str = ""  # a phrase on the days that do not count; empty if all do

    def summary(self) -> str:
        """Return a sentence that counts the images by kind."""
        reviewed = len(self.of_class) + sum(map(len, self.others.values()))
        others = "".join(f", {len(images)} {kind}" for kind, images in self.others.items())
        equal = effective_count(self.weights)
        counts = f", which count as {equal} drawn equally" if equal < len(self.of_class) else ""
        if self.labelled > reviewed:
            counts += (
                f" ({self.labelled} have a label; of each day, in the order of psc-log review, only those count up to "
                f"where fewer than {REVIEWED:.0%} have one)"
            )
        left_out = f"; {self.left_out}" if self.left_out else ""
        return (
            f"random sample from {self.days[0]} to {self.days[1]}: {self.logged} logged images, {reviewed} reviewed: "
            f"{len(self.of_class)} of a class{counts}{others}{left_out}"
        )

    def at(self, positions: Tensor) -> Sample:
        """Return the sample with only the images of a class at these ``positions``."""
        return replace(self, of_class=self.of_class.subset(positions), weights=self.weights[positions])


def read_sample(
    log: Log, model: FittedModel, name: str | None = None, *, since: str | None = None, until: str | None = None
) -> Sample:
    """Return the reviewed part of the random sample of some days, ``YYYY-MM-DD``, by any version of the model."""
    name = store.logged_model(log, name)
    days = store.days_of(log, name, since=since, until=until)
    rows = store.read_rows(log, name, sampled=True, days=days, columns=list(_COLUMNS))
    logged = images_of(join_labels(rows, read_labels(log), name), model.classes)
    if not logged:
        span = f" from {days[0]} to {days[-1]}" if days else ""
        raise UsageError(f"{log.where} has no logged sampled images of {name}{span}; serve with --log-sample")
    reviewed = _intact(log, reviewed_of(logged))
    if not any(image.kind == LABEL for image in reviewed):
        raise UsageError(
            f"of the {len(logged)} sampled images of {name} in {log.where}, each day's in the order of their digests, "
            f"{len(reviewed)} are reviewed and none of them has a label; label those of psc-log review --sample: "
            "others were chosen for what they look like, and no rate comes from them; of a short day label all"
        )
    by_kind = {kind: [image for image in reviewed if image.kind == kind] for kind in (NONE_OF_THE_CLASSES, CANNOT_TELL)}
    of_class = sorted((image for image in reviewed if image.kind == LABEL), key=lambda image: image.sha256)
    return Sample(
        _labelled(log, model, of_class),
        _weights(of_class),
        {kind: labelled_data(log, model, images) for kind, images in by_kind.items() if images},
        (days[0], days[-1]),
        len(logged),
        sum(image.kind is not None for image in logged),
        _left_out(logged, {image.day for image in reviewed}),
    )


def _left_out(logged: Sequence[LoggedLabel], days: Collection[date]) -> str:
    """Return a phrase on the days without those that count, and how many of their images have a label."""
    others = [image for image in logged if image.day not in days]
    if not others:
        return ""
    labelled, found = sum(image.kind is not None for image in others), sorted({image.day for image in others})
    which = f"{found[0]} is" if len(found) == 1 else f"{len(found)} days from {found[0]} to {found[-1]} are"
    return f"{which} left out, with {labelled} of {len(others)} images reviewed; label more of them"


def read_outside(log: Log, model: FittedModel, name: str | None = None, **span: str | None) -> ImageDataset:
    """Return the logged images outside the random sample labelled with a class or a number, each once, labelled."""
    logged = _outside(log, model, name, **span)
    if not logged:
        raise UsageError(
            f"all logged images of {store.logged_model(log, name)} in {log.where} are of the random sample, which "
            f"calibrates; {_SERVE_LESS}, or leave out --extend-density"
        )
    if not (of_class := _intact(log, [image for image in logged if image.kind == LABEL])):
        reviewed = sum(image.kind is not None for image in logged)
        raise UsageError(
            f"of the {len(logged)} logged images of {store.logged_model(log, name)} in {log.where} outside the random "
            f"sample {reviewed} are reviewed and none of them has a label; label some (psc-log review without "
            "--sample), or leave out --extend-density: images of the random sample calibrate, so they extend nothing"
        )
    return _labelled(log, model, of_class)


def read_named(log: Log, wide: FittedModel, name: str | None = None, **span: str | None) -> ImageDataset:
    """Return the images outside the random sample that people named as the last class of ``wide``."""
    logged, of = _outside(log, wide, name, **span), wide.classes[-1]
    if is_cluster(NONE_OF_THE_CLASSES, of):
        raise UsageError(f"{of} is a number that psc-log review --clusters gave, and no name; name its images first")
    if not (named := _intact(log, [image for image in logged if image.kind == LABEL and image.label == of])):
        others = Counter(image.label for image in logged if image.kind == NONE_OF_THE_CLASSES and image.label)
        given = ", ".join(f"{label} ({count})" for label, count in others.most_common())
        if inside := sum(image.label == of for image in _labelled_ones(log, wide, name, **span)):
            raise UsageError(
                f"{inside} images of {log.where} are named {of}, all of the random sample, which calibrates; "
                f"{_SERVE_LESS}"
            )
        raise UsageError(
            f"people named no image of {log.where} outside the random sample {of}; label some "
            f"{NONE_OF_THE_CLASSES}:{of}, or give a name that they gave: {given or 'there is none'}"
        )
    return _labelled(log, wide, named)


def _outside(log: Log, model: FittedModel, name: str | None, **span: str | None) -> list[LoggedLabel]:
    """Return the images outside the random sample by digest; one whose bytes are also inside belongs to it."""
    name = store.logged_model(log, name)
    rows = store.read_rows(log, name, days=store.days_of(log, name, **span), columns=[*_COLUMNS, "sampled"])
    sample, others = set(), []
    for batch in join_labels(rows, read_labels(log), name):
        is_sampled = batch["sampled"].to_pylist()
        sample |= {sha256 for sha256, is_in in zip(batch[SHA256].to_pylist(), is_sampled, strict=True) if is_in}
        others.append(batch.filter(store.arrow().array([not is_in for is_in in is_sampled])))
    logged = (image for image in images_of(others, model.classes) if image.sha256 not in sample)
    return sorted(logged, key=lambda image: image.sha256)


def read_unknown(
    log: Log, model: FittedModel, name: str | None = None, **span: str | None
) -> tuple[ImageDataset, list[str]]:
    """Return the logged images reviewed as none of the classes, labelled with their kinds, and the day of each.

    The first kind is of those that nobody gave a name.
    """
    found = unknown_of(log, model, name, **span)
    kinds = [NONE_OF_THE_CLASSES, *sorted({image.label for image in found if image.label is not None})]
    labels = torch.tensor([kinds.index(image.label or NONE_OF_THE_CLASSES) for image in found], dtype=torch.int64)
    images = replace(labelled_data(log, model, found), classes=tuple(kinds), labels=labels)
    return images, [image.day.isoformat() for image in found]


def unknown_of(log: Log, model: FittedModel, name: str | None = None, **span: str | None) -> list[LoggedLabel]:
    """Return the labels of the logged images reviewed as none of the classes, in the order of their digests."""
    joined = _labelled_ones(log, model, name, **span)
    found = sorted((image for image in joined if image.kind == NONE_OF_THE_CLASSES), key=lambda image: image.sha256)
    return _intact(log, found)


def _labelled_ones(log: Log, model: FittedModel, name: str | None, **span: str | None) -> list[LoggedLabel]:
    name = store.logged_model(log, name)
    rows = store.read_rows(log, name, days=store.days_of(log, name, **span), columns=list(_COLUMNS))
    return images_of(join_labels(rows, read_labels(log), name), model.classes)


def _intact(log: Log, images: Sequence[LoggedLabel]) -> list[LoggedLabel]:
    return list(compress(images, store.are_intact(log, [image.path for image in images])))


def images_of(rows: Iterable[Any], classes: Collection[str] = ()) -> list[LoggedLabel]:
    """Return each logged image of the rows once, with the latest label on any of its rows.

    An image that was none of the classes, and is named as one of ``classes``, shows that one, which was added since.
    """
    found: dict[str, LoggedLabel] = {}
    for batch in rows:
        for row in batch.to_pylist():
            sha256, path = row[SHA256], row[IMAGE_PATH]
            if not store.is_stored(sha256, path):
                continue
            before = found.get(sha256)
            kind, label, time = row["kind"], row["true_label"], row["label_time"]
            kind = LABEL if kind == NONE_OF_THE_CLASSES and label in classes else kind
            label = None if is_cluster(kind, label) else label
            if before and before.label_time and (time is None or before.label_time > time):
                kind, label, time = before.kind, before.label, before.label_time
            probability = max(row["sample_probability"], before.probability if before else 0.0)
            first = min(row["time"], before.time) if before else row["time"]
            found[sha256] = LoggedLabel(first, sha256, path, probability, kind, label, time)
    return list(found.values())


def reviewed_of(images: Iterable[LoggedLabel]) -> list[LoggedLabel]:
    """Return the reviewed images that count, each day's in the order of their digests.

    The days are those that make the effective number of images largest, on a tie the most.
    """
    ordered = sorted(images, key=lambda image: (image.day, image.sha256))
    days: list[tuple[float, list[LoggedLabel]]] = []  # the reviewed share of each, and its images
    for _, of_day in groupby(ordered, key=lambda image: image.day):
        day = list(of_day)
        asked = _asked(day)
        share, counting = len(asked) / len(day), (day[at] for at in asked if day[at].kind is not None)
        days.append((share, [replace(image, probability=image.probability * share) for image in counting]))

    def with_share(smallest: float) -> list[LoggedLabel]:
        return [image for share, of_day in days if share >= smallest for image in of_day]

    shares = sorted({share for share, of_day in days if of_day})  # ascending, as max takes the first of equals
    return with_share(max(shares, key=lambda share: effective_count(_weights(with_share(share))), default=1.0))


_TIMES: Final = 256  # at which a day is cut at most, as each looks at all of its images


def _asked(day: Sequence[LoggedLabel]) -> npt.NDArray[np.intp]:
    """Return the positions of those of a day's images, in the order of their digests, that are asked for labels."""
    from scipy import stats  # imported here, so that a service does not load it

    is_labelled = np.array([image.kind is not None for image in day])
    times = np.array([image.time.timestamp() for image in day])

    def until(time: float) -> npt.NDArray[np.intp]:
        at = (times <= time).nonzero()[0]
        enough = is_labelled[at].cumsum() >= REVIEWED * np.arange(1, len(at) + 1)
        return at[: int(enough.nonzero()[0].max(initial=-1)) + 1]

    ends = np.unique(times[is_labelled])[::-1]
    found = [until(time) for time in ends[:: len(ends) // _TIMES + 1]] or [until(-np.inf)]
    most = max(found, key=lambda at: is_labelled[at].sum())
    asked = most if 2 * is_labelled[most].sum() >= is_labelled.sum() else found[0]
    labelled = int(is_labelled[asked].sum())
    luck = stats.hypergeom.sf(labelled - 1, len(day), int(is_labelled.sum()), len(asked))
    return asked if labelled >= REVIEWED * len(day) or luck <= LUCK else asked[:0]


def _weights(images: Sequence[LoggedLabel]) -> Float[Tensor, " n"]:
    return torch.tensor([1 / image.probability for image in images], dtype=torch.float64)


def _labelled(log: Log, model: FittedModel, images: Sequence[LoggedLabel]) -> ImageDataset:
    """Return images that show a class or a number, labelled with it."""
    said = [str(image.label) for image in images]
    return model.task.relabelled(labelled_data(log, model, images), said)


def labelled_data(log: Log, model: FittedModel, images: Sequence[LoggedLabel]) -> ImageDataset:
    source = store.LoggedImages(log, [image.path for image in images])
    labels = torch.zeros(len(images), dtype=torch.int64)
    return label_images(f"images of {log.where}", model.classes, source, labels, model.preprocess)
