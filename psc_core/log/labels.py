"""People's labels on logged images, and their import from Label Studio's export, a CSV or folders of images.

A label names its model, and its image by request and position, by the digest of its bytes, or by both.  It applies to
every row of that model with these bytes, and the last label on an image counts.  Older labels without a model apply
only to their row, or, if they name only a digest, to every row of that image.

A CSV, and the data of a Label Studio task, have the columns ``request_id`` and ``image_index``, or ``image_sha256``;
``label``, which is a class, a number, ``none_of_the_classes`` or ``cannot_tell``; and optionally ``model``,
``annotator`` or ``source``, and ``updated_at``.  After ``none_of_the_classes:`` may stand what it is, as a folder
inside ``none_of_the_classes`` may say.  An answer that cannot be used raises an error that names its place, and nothing
is written; an empty one is skipped.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Literal, get_args

from psc_core.errors import DataError, ImageError, warn
from psc_core.images import SUFFIXES
from psc_core.images.files import files_below, is_hidden, read_file
from psc_core.log import store
from psc_core.log.store import IMAGE_INDEX, IMAGE_PATH, INPUT, LABELS, OTHER, REQUEST_ID, SHA256, Log, LoggedModel
from psc_core.text import check_columns, compose, number_marks, open_csv

LabelKind = Literal["label", "none_of_the_classes", "cannot_tell"]
LABEL_KINDS: Final[tuple[LabelKind, ...]] = get_args(LabelKind)  # this label; none of the classes; nobody can tell
LABEL: Final = "label"
NONE_OF_THE_CLASSES: Final = "none_of_the_classes"
CANNOT_TELL: Final = "cannot_tell"
OF: Final = ":"  # between ``none_of_the_classes`` and a name that people give to what they see
_CLUSTER: Final = re.compile(r"cluster [1-9][0-9]*")
LATER: Final = timedelta(microseconds=1)  # than the label that a command replaces: what people say meanwhile counts
Key = tuple[str | None, str | int | None]  # a request and a position, or a model and the digest of an image


def check_name(text: str, answered: LoggedModel | None = None) -> str:
    """Return a name that people give, composed; raise :class:`DataError` for a word that says its kind instead.

    Of what is none of the classes no class of the bundle that ``answered`` is a name.
    """
    name = compose(text)
    if answered is not None and answered.task.number() is None and name in answered.classes:
        raise DataError(
            f"{name!r} is a class of the model that answered; send kind=label to POST /feedback, or label the image "
            f"{name!r} without {NONE_OF_THE_CLASSES}"
        )
    if (kind := name.partition(OF)[0]) in LABEL_KINDS[1:]:
        raise DataError(f"expected a name, got {name!r}; say kind={kind} to POST /feedback, or choose another name")
    return name


def is_cluster(kind: str | None, name: str | None) -> bool:
    """Return whether what is none of the classes has only the name of a cluster, which counts as none."""
    return kind == NONE_OF_THE_CLASSES and _CLUSTER.fullmatch(name or "") is not None


@dataclass(frozen=True)
class Label:
    """One label, on an image named by ``request_id`` and ``image_index``, by ``image_sha256``, or by both."""

    request_id: str | None
    image_index: int | None
    image_sha256: str | None
    kind: str  # one of :data:`LABEL_KINDS`
    label: str | None  # a class, or a number as text; what people called an image of none of the classes, or None
    source: str
    time: datetime  # with a time zone
    model: str | None = None  # the name under which it was served


def label_keys(
    model: str | None, request_id: str | None, image_index: int | None, image_sha256: str | None
) -> list[Key]:
    """Return the keys under which a label is found: its row, and its image if it names a model or no row."""
    of_row: list[Key] = [(request_id, image_index)] if request_id is not None else []
    of_image: list[Key] = [(model, image_sha256)] if image_sha256 is not None else []
    return of_row + of_image if model is not None else of_row or of_image


def row_keys(model: str, request_id: str, image_index: int, image_sha256: str | None) -> list[Key]:
    """Return all keys under which a label on the image of a row may be found."""
    of_image: list[Key] = [(model, image_sha256), (None, image_sha256)] if image_sha256 is not None else []
    return [(request_id, image_index), *of_image]


class Labels:
    """The last label on each image."""

    def __init__(self, labels: Iterable[Label] = ()) -> None:
        ordered = sorted(labels, key=lambda each: each.time)
        self._last = {
            key: label
            for label in ordered
            for key in label_keys(label.model, label.request_id, label.image_index, label.image_sha256)
        }

    def last(self) -> set[Label]:
        """Return those that are the last on a row or an image."""
        return {*self._last.values()}

    def of(self, model: str, request_id: str, image_index: int, image_sha256: str | None) -> Label | None:
        keys = row_keys(model, request_id, image_index, image_sha256)
        return max((self._last[key] for key in keys if key in self._last), key=lambda each: each.time, default=None)


def read_labels(log: Log) -> Labels:
    """Return the last label on each image of a log; all labels are held in memory."""
    return Labels(_all_labels(log))


def _all_labels(log: Log) -> Iterator[Label]:
    return (label for name, _ in label_files(log) for label in read_label_file(log, name))


def label_files(log: Log) -> list[tuple[str, datetime]]:
    return list(log.names(LABELS, suffix=".parquet"))


def read_label_file(log: Log, name: str) -> list[Label]:
    pa = store.arrow()
    with store.naming_damage(log, name, "labels"):
        table = pa.parquet.read_table(pa.BufferReader(log.get(name)), schema=store.label_schema())
        return [Label(**row) for row in table.to_pylist()]


def write_labels(log: Log, labels: Iterable[Label], name: str | None = None) -> None:
    pa = store.arrow()
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(pa.Table.from_pylist([vars(label) for label in labels], schema=store.label_schema()), sink)
    log.put(name or store.labels_path(), sink.getvalue())


def rename(log: Log, model: str, old: str, new: str) -> int:
    """Label a model's images of the class ``old``, or named so, again, and return the number of labels.

    ``new`` is what the class is called now, or :data:`NONE_OF_THE_CLASSES`, which keeps the name.  What is none of the
    classes becomes a label where a bundle of the model has the class ``new``.
    """
    old, is_gone = compose(old), new == NONE_OF_THE_CLASSES
    text, kinds = (
        (old, {LABEL: new}) if is_gone else (check_name(new), {LABEL: LABEL, NONE_OF_THE_CLASSES: NONE_OF_THE_CLASSES})
    )
    of_old = [
        each
        for each in read_labels(log).last()
        if each.label == old and each.kind in kinds and each.model in (model, None)
    ]
    if not is_gone and any(each.kind == NONE_OF_THE_CLASSES for each in of_old) and _has_class(log, model, text):
        kinds[NONE_OF_THE_CLASSES] = LABEL
    found = [
        replace(each, kind=kinds[each.kind], label=text, source="psc-log rename", time=each.time + LATER)
        for each in of_old
    ]
    if found:
        write_labels(log, found)
    return len(found)


def _has_class(log: Log, model: str, name: str) -> bool:
    """Return whether a bundle that answered under the name of a model has a class."""
    versions = {batch["bundle_version"][0].as_py() for batch in store.read_rows(log, model, columns=["bundle_version"])}
    bundles = (store.read_model(log, version) for version in sorted(versions))
    return any(name in each.classes for each in bundles if each.task.number() is None)


def join_labels(rows: Iterable[Any], labels: Labels, model: str) -> Iterator[Any]:
    """Yield rows with the columns ``kind``, ``true_label`` and ``label_time``, null without a label."""
    pa = store.arrow()
    for batch in rows:
        keys = zip(*(batch[name].to_pylist() for name in (REQUEST_ID, IMAGE_INDEX, SHA256)), strict=True)
        found = [labels.of(model, *key) for key in keys]
        for name, cells, arrow_type in (
            ("kind", [each and each.kind for each in found], pa.string()),
            ("true_label", [each and each.label for each in found], pa.string()),
            ("label_time", [each and each.time for each in found], pa.timestamp("us", tz="UTC")),
        ):
            batch = batch.append_column(name, pa.array(cells, arrow_type))
        yield batch


MAX_TASKS_BYTES: Final = 1 << 30  # maximum size of a file of answers, in bytes
_MAX_SOURCE: Final = 200
_FOLDER: Final = "folder"  # the source of its answers
_UNLABELLED: Final = ("no_label", "_unlabeled")  # where CVAT and FiftyOne put images without a label
MAX_NAME: Final = 200  # length of a name that people give to what is none of the classes


@dataclass(frozen=True)
class HumanAnswer:
    where: str  # the file and line, or task
    request_id: str | None
    image_index: int | None
    image_sha256: str | None
    text: str  # a class, a number, or one of the other labels
    source: str
    time: datetime | None
    model: str | None = None  # that saw the image; None if the answer does not say
    marks: str = "."  # how a number is written, see :func:`psc_core.text.parse_number`

    @property
    def row(self) -> tuple[str | None, int | None]:
        return self.request_id, self.image_index

    def is_of(self, model: str | None) -> bool:
        return model is None or self.model in (None, model)


# The version of the bundle that answered last, the digest of the image, and the version that answered first.
_Row = tuple[str, str | None, str]


def read_answers(path: Path) -> Iterator[HumanAnswer]:
    """Yield the answers in a ``.json`` or ``.csv`` file, or in a folder with a subfolder of images for each answer."""
    if path.is_dir():
        yield from _folders(path)
    elif path.suffix.lower() == ".csv":
        yield from _csv(path)
    elif path.suffix.lower() == ".json":
        yield from _json(path)
    else:
        raise DataError(f"expected a .json or .csv file or a folder, got {path}; export the labels as one of them")


def labels_of(log: Log, answers: Iterable[HumanAnswer], model: str | None = None) -> list[Label]:
    """Return the labels for answers: of the model that an answer names, or else of each one that could have said it.

    It warns of answers on images without a row, which may be pruned, and of labels on images that are not stored.
    """
    given = [answer for answer in answers if answer.is_of(model)]
    rows = _Rows(log, given, store.models_in(log) if model is None else [store.logged_model(log, model)])
    of_each = [[*_labels(answer, rows)] for answer in given]
    said = [(answer, label) for answer, of_answer in zip(given, of_each, strict=True) for label in of_answer]
    _check_agreement(said)
    labels = _news(log, said)
    if missing := [answer for answer in given if not rows.of(answer)]:
        text = f"{len(missing)} of {len(given)} answers are on images without a row in the log: {missing[0].where}"
        if len(missing) == len(given):
            raise DataError(f"{text}; give the log of these images, and the model that they name")
        warn(f"{text} is the first; they are left out")
    if unlabelled := of_each.count([]) - len(missing):
        text = f"{unlabelled} images in folders named {' or '.join(_UNLABELLED)} have no label yet"
        if not said:
            raise DataError(f"{text}; label some of them and export them again")
        warn(f"{text}, and are left out")
    if unused := sum((label.model, label.image_sha256) not in rows.stored for label in labels):
        warn(f"{unused} of {len(labels)} labels are on images that are not stored: nothing uses them (--log-images)")
    return labels


def _check_agreement(said: Iterable[tuple[HumanAnswer, Label]]) -> None:
    """Raise if two answers without a time differ on an image: neither is the last."""
    first: dict[Any, tuple[str, Any]] = {}
    for answer, label in said:
        if answer.time is None:
            image, what = (label.model, label.image_sha256 or answer.row), (label.kind, label.label)
            where, before = first.setdefault(image, (answer.where, what))
            if before != what:
                raise DataError(
                    f"{answer.where}: {where} says something else of this image; remove one of them, or review and "
                    "import each model by itself, with --model"
                )


def _news(log: Log, said: Sequence[tuple[HumanAnswer, Label]]) -> list[Label]:
    """Return the labels without a time only where they are not the last of their source: others may have come since."""
    if all(answer.time is not None for answer, _ in said):
        return [label for _, label in said]
    before = sorted(_all_labels(log), key=lambda each: each.time)
    last = {_place(label): (label.kind, label.label) for label in before}
    return [new for answer, new in said if answer.time is not None or last.get(_place(new)) != (new.kind, new.label)]


def _place(label: Label) -> tuple[Any, ...]:
    return label.source, label.model, label.request_id, label.image_index, label.image_sha256


class _Rows:
    """The rows of a log on which there are answers, and the bundles of its models, each read once."""

    def __init__(self, log: Log, answers: Iterable[HumanAnswer], models: Iterable[str]) -> None:
        self._rows: dict[Any, dict[str, _Row]] = {key: {} for each in answers for key in (each.row, each.image_sha256)}
        self._rows.pop(None, None)
        self._read = cache(partial(store.read_model, log))
        self._versions = defaultdict[str, dict[str, None]](dict)
        self.stored = set[tuple[str | None, str | None]]()  # models, and the digests of their images
        columns = [REQUEST_ID, IMAGE_INDEX, SHA256, IMAGE_PATH, "bundle_version"]
        for name in models:
            for batch in store.read_rows(log, name, columns=columns):
                self._versions[name][batch["bundle_version"][0].as_py()] = None
                for request_id, index, digest, path, version in zip(*(each.to_pylist() for each in batch), strict=True):
                    for key in ((request_id, index), digest):
                        if key in self._rows:
                            *_, first = self._rows[key].get(name, (version,))
                            self._rows[key][name] = version, digest, first
                    if path:
                        self.stored.add((name, digest))

    def named_by(self, answer: HumanAnswer) -> Mapping[str, _Row]:
        """Return the row that an answer names by its request, for each model."""
        return self._rows[answer.row]

    def of(self, answer: HumanAnswer) -> dict[str, _Row]:
        """Return a row of the image for each model that an answer may be of."""
        found = {**self._rows.get(answer.image_sha256, {}), **self.named_by(answer)}
        return {name: row for name, row in found.items() if answer.is_of(name)}

    def bundle(self, version: str) -> LoggedModel:
        return self._read(version)

    def bundles(self, name: str, version: str) -> Iterator[LoggedModel]:
        """Yield that of one version, and then those of the model's others."""
        return map(self._read, dict.fromkeys((version, *self._versions[name])))


def check_label(text: str, models: Iterable[LoggedModel], marks: str = ".") -> str:
    """Return a label as the first bundle that can predict it has it: it may be of a class that was added since."""
    errors = []
    for model in models:
        try:
            return model.check_label(text, marks)
        except DataError as error:
            errors.append(error)
    raise errors[0]


def _labels(answer: HumanAnswer, rows: _Rows) -> Iterator[Label]:
    """Yield the label for each model that saw the image and can predict the answer; raise if all refuse it."""
    named, found = rows.named_by(answer), rows.of(answer)
    for _, sha256, _ in named.values():
        if None not in (sha256, answer.image_sha256) and sha256 != answer.image_sha256:
            raise DataError(
                f"{answer.where}: the row is of the image {sha256}, not of {answer.image_sha256}; correct "
                "request_id or image_index"
            )
    errors = []
    for name, row in found.items():
        try:
            of_image = answer if name in named else replace(answer, request_id=None, image_index=None)
            yield _label(of_image, row, rows, name)
        except DataError as error:
            errors.append(error)
    is_unlabelled = answer.source == _FOLDER and answer.text in _UNLABELLED
    if errors and len(errors) == len(found) and not is_unlabelled:
        raise DataError(f"{answer.where}: {errors[0]}") from errors[0]


def _label(answer: HumanAnswer, row: _Row, rows: _Rows, name: str) -> Label:
    kind, text, (version, sha256, first) = LABEL, answer.text, row
    if text.partition(OF)[0] == NONE_OF_THE_CLASSES:
        kind, _, text = text.partition(OF)
        # It may have been named before a later bundle that answered had the class.
        text = check_name(text, rows.bundle(first) if text.strip() else None)
    elif text == CANNOT_TELL:
        kind, text = text, ""
    else:
        text = check_label(text, rows.bundles(name, version), answer.marks)
    now = datetime.now(UTC)  # otherwise a clock that is ahead wins over later labels
    return Label(
        answer.request_id,
        answer.image_index,
        sha256,  # None if erased: an answer must not bring the digest back
        kind,
        _writable(text.strip(), MAX_NAME) or None,
        _writable(answer.source, _MAX_SOURCE),
        min(answer.time or now, now),
        name,
    )


def _writable(text: str, limit: int) -> str:
    return text[:limit].encode("utf-8", "replace").decode()


def _csv(path: Path) -> Iterator[HumanAnswer]:
    _check_size(path)
    with open_csv(path) as opened:
        names = [*map(compose, next(opened.lines, (0, []))[1])]
        if names and names[-1].endswith(";"):
            raise DataError(
                f"{path}: a spreadsheet read its lines as single cells and added a column behind a semicolon; open the "
                "file from psc-log review with the comma as separator, and fill in the column label"
            )
        if "label" not in names or not ({REQUEST_ID, IMAGE_INDEX} <= set(names) or SHA256 in names):
            raise DataError(
                f"{path}: expected the columns label and {REQUEST_ID}, {IMAGE_INDEX} or {SHA256}, got "
                f"{', '.join(names)[:200] or 'none'}; keep the first line of the file from psc-log review"
            )
        check_columns(path, names)
        lines = [*opened.lines]
    for number, cells in lines:
        if len(cells) != len(names):
            raise DataError(f"{path}, line {number}: expected {len(names)} cells, got {len(cells)}; correct the line")
    marks = number_marks((cells[names.index("label")] for _, cells in lines), opened.delimiter)
    for number, cells in lines:
        line = dict(zip(names, cells, strict=True))
        answer = _answer(f"{path}, line {number}", line)
        if answer is not None:
            yield replace(answer, marks=marks)


def _json(path: Path) -> Iterator[HumanAnswer]:
    _check_size(path)
    try:
        tasks = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON ({error}); export the labels from Label Studio as JSON") from error
    if not isinstance(tasks, list):
        raise DataError(f"{path}: expected a list of tasks, got {type(tasks).__name__}; export the labels as JSON")
    for number, task in enumerate(tasks, 1):
        where = f"{path}, task {number}"
        if not isinstance(task, dict):
            raise DataError(f"{where}: expected an object, got {type(task).__name__}; export the labels as JSON")
        # JSON-MIN has data and answer side by side.
        answer = _of_task(where, task) if "annotations" in task else _answer(where, task)
        if answer is not None:
            yield answer


def _of_task(where: str, task: Mapping[str, Any]) -> HumanAnswer | None:
    data, annotations = task.get("data"), task["annotations"]
    if not isinstance(data, dict) or not isinstance(annotations, list):
        raise DataError(f"{where}: expected data and a list of annotations; export the labels as JSON")
    given = [each for each in annotations if isinstance(each, dict) and each.get("result")]
    done = [each for each in given if not each.get("was_cancelled")]
    if not done:
        return None
    last = max(done, key=lambda each: str(each.get("updated_at") or each.get("created_at") or ""))
    texts: list[Any] = []
    for region in last["result"] if isinstance(last["result"], list) else []:
        value = region.get("value") if isinstance(region, dict) else None
        if isinstance(value, dict):
            texts += value["choices"] if isinstance(value.get("choices"), list) else []
            texts += [value["number"]] if "number" in value else []
    if len(texts) != 1:
        raise DataError(f"{where}: expected one choice or number, got {len(texts)}; correct the annotation")
    person = last.get("completed_by")
    person = person.get("id") if isinstance(person, dict) else person
    source = "label studio" if person is None else f"label studio {person}"
    time = last.get("updated_at") or last.get("created_at")
    return _answer(where, {**data, "label": texts[0], "annotator": source, "updated_at": time})


def _folders(root: Path) -> Iterator[HumanAnswer]:
    folders = sorted(each for each in root.iterdir() if each.is_dir() and not is_hidden(each.name))
    if not folders:
        raise DataError(f"{root} has no folders; make one for each class, and put the images of the class there")
    unread = []
    for folder in folders:
        for file in sorted(files_below(folder)):
            if not file.lower().endswith((*SUFFIXES, f".{INPUT}", f".{OTHER}")):
                unread.append(file)
            elif Path(file).is_file():
                try:
                    digest = hashlib.sha256(read_file(file)).hexdigest()
                except ImageError as error:
                    raise DataError(f"{file}: {error}") from error
                text, inside = folder.name, Path(file).relative_to(folder).parts[:-1]
                # of the image in the log, as a tool kept it
                is_path = inside[-1:] == (digest[:2],) and Path(file).stem == digest
                if text == NONE_OF_THE_CLASSES and inside and not is_path:
                    text = f"{text}{OF}{inside[0]}"
                yield HumanAnswer(file, None, None, digest, compose(text), _FOLDER, None)
    if unread:
        warn(f"{len(unread)} files of {root} are not named as images and were not read, the first {unread[0]}")


def _answer(where: str, of: Mapping[str, Any]) -> HumanAnswer | None:
    """Return the answer for the image that ``of`` names; None if there is no answer yet."""
    text, source = of.get("label"), of.get("annotator") or of.get("source")
    if text is None or (isinstance(text, str) and not text.strip()):
        return None
    if isinstance(text, bool) or not isinstance(text, str | int | float):
        raise DataError(f"{where}: expected one label, got {type(text).__name__}; correct it")
    request_id, digest, number = of.get(REQUEST_ID) or None, of.get(SHA256) or None, None
    if request_id is not None:
        number = _whole(of.get(IMAGE_INDEX))
        if not isinstance(request_id, str) or number is None:
            raise DataError(
                f"{where}: expected {REQUEST_ID} and a whole number {IMAGE_INDEX}; keep the values from the review"
            )
    elif not isinstance(digest, str):
        raise DataError(f"{where}: there is neither {REQUEST_ID} nor {SHA256}; keep the values from the review")
    named, time = "file" if source in (None, "") else str(source), _time(of.get("updated_at"))
    answer = HumanAnswer(where, request_id, number, digest, compose(str(text)), named, time)
    model = str(of["model"]) if of.get("model") else None
    return replace(answer, image_sha256=digest.lower() if isinstance(digest, str) else None, model=model)


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and value.strip().isascii() and value.strip().isdigit() and len(value) < 10:
        return int(value)
    return value if type(value) is int and 0 <= value < 1 << 31 else None


def _time(value: Any) -> datetime | None:
    """Return a time in UTC; None if it cannot be parsed, because an answer must not be lost for its date."""
    try:
        found = datetime.fromisoformat(value)
        return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)
    except (TypeError, ValueError, OverflowError):
        return None


def _check_size(path: Path) -> None:
    if not path.is_file():
        raise DataError(f"{path} is not a file; check the path")
    if path.stat().st_size > MAX_TASKS_BYTES:
        raise DataError(f"{path} has more than {MAX_TASKS_BYTES} bytes; split it")
