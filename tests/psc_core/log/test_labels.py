"""Answers of people: every form is read, a broken one is named; the last label on an image wins."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from psc_core.errors import DataError, UsageError
from psc_core.log.erase import erase
from psc_core.log.labels import (
    Label,
    Labels,
    join_labels,
    label_files,
    labels_of,
    read_answers,
    read_label_file,
    read_labels,
    rename,
    write_labels,
)
from psc_core.log.store import Log, LoggedModel, label_schema, model_path, read_rows
from psc_core.tasks.classification import Classification
from tests.psc_core.log.support import TIME, add_values, content, digest, make_log, put_rows, row

OF_ROW = Label("r0", 0, digest(0), "label", "cat", "a person", TIME)


def test_last_label_wins() -> None:
    later = replace(OF_ROW, kind="cannot_tell", label=None, time=TIME + timedelta(seconds=1))
    of_image = Label(None, None, digest(0), "label", "dog", "folder", TIME + timedelta(seconds=2))
    for order in ([OF_ROW, later], [later, OF_ROW]):
        assert Labels(order).of("m", "r0", 0, digest(0)) == later
    labels = Labels([of_image, OF_ROW])
    assert labels.of("m", "r0", 0, digest(0)) == of_image
    assert labels.of("m", "r7", 3, digest(0)) == of_image
    assert labels.of("m", "r0", 0, None) == OF_ROW
    assert labels.of("m", "r1", 0, digest(1)) is labels.of("m", "r1", 0, None) is None


def test_label_holds_for_the_same_bytes_in_any_request_to_its_model() -> None:
    labels = Labels([replace(OF_ROW, model="m")])
    assert labels.of("m", "r7", 3, digest(0)) == labels.of("m", "r0", 0, None) == replace(OF_ROW, model="m")
    assert labels.of("other", "r7", 3, digest(0)) is None
    assert Labels([OF_ROW]).of("m", "r7", 3, digest(0)) is None  # It does not say which model it is of.


def test_labels_beside_rows(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(9, image_sha256=digest(2))])
    write_labels(log, [OF_ROW])
    write_labels(log, [Label(None, None, digest(2), "none_of_the_classes", None, "folder", TIME)])
    labels = read_labels(log)
    assert [OF_ROW] in [read_label_file(log, name) for name, _ in label_files(log)]
    found = {
        row["request_id"]: row for batch in join_labels(read_rows(log, "m"), labels, "m") for row in batch.to_pylist()
    }
    assert {name: (row["kind"], row["true_label"]) for name, row in found.items()} == {
        "r0": ("label", "cat"), "r1": (None, None), "r2": ("none_of_the_classes", None),
        "r9": ("none_of_the_classes", None),
    }  # fmt: skip


def test_labels_from_before_the_column_model_are_read(tmp_path: Path) -> None:
    log = make_log(tmp_path, 1)
    old = {name: cell for name, cell in vars(OF_ROW).items() if name != "model"}
    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([old], schema=pa.schema(list(label_schema())[:-1])), sink)
    log.put("labels/part-old.parquet", sink.getvalue())
    write_labels(log, [replace(OF_ROW, request_id="r1", model="m")])
    labels = read_labels(log)
    assert (labels.of("m", "r0", 0, None), labels.of("m", "r1", 0, None)) == (
        OF_ROW, replace(OF_ROW, request_id="r1", model="m"),
    )  # fmt: skip


def test_a_class_is_renamed_where_no_other_label_came_later(tmp_path: Path) -> None:
    log = make_log(tmp_path, 2)
    of_rows = [replace(OF_ROW, model="m"), replace(OF_ROW, request_id="r1", image_sha256=digest(1), model="m")]
    since = Label(None, None, digest(1), "label", "dog", "folder", TIME + timedelta(seconds=1), "m")
    write_labels(log, [*of_rows, since, replace(OF_ROW, model="other")])
    rename(log, "m", "cat", "lion")
    labels = read_labels(log)
    found = [labels.of("m", f"r{at}", 0, digest(at)) for at in range(2)]
    assert [each and each.label for each in found] == ["lion", "dog"]
    other = labels.of("other", "r7", 0, digest(0))
    assert other is not None and other.label == "cat"


def test_names_of_what_is_none_of_the_classes_are_renamed_too(tmp_path: Path) -> None:
    log, none = make_log(tmp_path, 5), "none_of_the_classes"
    said = [("label", "eight"), (none, "eight"), (none, "Eight"), (none, None), ("cannot_tell", None)]
    times = [TIME + timedelta(seconds=at) for at in range(len(said))]
    write_labels(log, [Label(f"r{at}", 0, digest(at), *each, "x", times[at], "m") for at, each in enumerate(said)])
    write_labels(log, [Label("r90", 0, None, none, "eight", "x", TIME, "other")])

    def named() -> list[tuple[str, str | None]]:
        found = [read_labels(log).of("m", f"r{at}", 0, digest(at)) for at in range(len(said))]
        return [(each.kind, each.label) for each in found if each is not None]

    assert rename(log, "m", "Eight", "eight") == 1 and named()[2] == (none, "eight")  # Two spellings of a name.
    assert rename(log, "m", "eight", "8") == 3
    assert named() == [("label", "8"), (none, "8"), (none, "8"), *said[3:]]
    assert rename(log, "m", "8", none) == 1 and named()[:3] == [(none, "8")] * 3
    assert rename(log, "m", "8", none) == 0
    assert rename(log, "m", "8", "dog") == 3 and named()[:3] == [("label", "dog")] * 3  # A bundle has this class.
    other = read_labels(log).of("other", "r90", 0, None)
    assert other is not None and other.label == "eight"


def test_an_answer_without_a_time_is_imported_once(tmp_path: Path) -> None:
    """Again, it would win over what was said since."""
    log = make_log(tmp_path / "log", 2)

    def imported(text: str) -> list[str | None]:
        found = answered(log, tmp_path, f"request_id,image_index,label\nr0,0,{text}\nr1,0,dog\n")
        write_labels(log, found)
        return [each.label for each in found]

    assert imported("cat") == ["cat", "dog"]
    now = datetime.now(UTC)
    write_labels(log, [replace(OF_ROW, label="dog", source="page", time=now, model="m")])
    assert imported("cat") == []
    rename(log, "m", "dog", "none_of_the_classes")
    assert imported("cat") == [] and imported("dog") == ["dog"]
    assert imported("cat") == ["cat"]
    line = "r0,0,cat,4,2026-03-02T10:00:00Z,camera 3\n"  # the last a column of the tasks
    head = "request_id,image_index,label,annotator,updated_at,source\n"
    (label,) = answered(log, tmp_path, head + line)  # As Label Studio exports it.
    assert (label.source, label.time) == ("4", datetime(2026, 3, 2, 10, tzinfo=UTC))


def test_the_labels_of_a_log_are_read_only_for_answers_without_a_time(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 1)
    log.put("labels/part-z.parquet", b"torn")
    found = answered(log, tmp_path, "request_id,image_index,label,updated_at\nr0,0,cat,2026-03-02\n")
    assert parts(found) == [("r0", "label", "cat")]
    with pytest.raises(DataError, match="part-z"):
        answered(log, tmp_path, "request_id,image_index,label\nr0,0,cat\n")


def test_damaged_file_is_named(tmp_path: Path) -> None:
    log = make_log(tmp_path)
    log.put("labels/part-z.parquet", b"torn")
    with pytest.raises(DataError, match=r"part-z\.parquet is not a file of labels"):
        read_labels(log)


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    log = make_log(tmp_path_factory.mktemp("log"))
    add_values(log)
    return log


def task(index: int, *results: Any, **annotation: Any) -> dict[str, Any]:
    """A task of Label Studio's export with one annotation."""
    data = {"image": "…", "request_id": f"r{index}", "image_index": 0, "image_sha256": digest(index)}
    done = {"id": 1, "completed_by": 4, "updated_at": "2026-03-02T10:00:00.5Z", "was_cancelled": False, **annotation}
    regions = [{"from_name": "label", "to_name": "image", "type": "choices", "value": value} for value in results]
    return {"id": index, "data": data, "annotations": [{**done, "result": regions}]}


def answered(log: Log, folder: Path, text: str, model: str | None = None) -> list[Label]:
    """The labels of a CSV file of this text."""
    (folder / "x.csv").write_text(text)
    return labels_of(log, read_answers(folder / "x.csv"), model)


def parts(labels: list[Label]) -> list[tuple[Any, ...]]:
    return [(each.request_id, each.kind, each.label) for each in labels]


def test_export_of_label_studio(log: Log, tmp_path: Path) -> None:
    twice = task(2, {"choices": ["dog"]})
    twice["annotations"].insert(0, task(2, {"choices": ["cat"]}, updated_at="2026-03-02T11:00:00Z")["annotations"][0])
    skipped = [task(3, {"choices": ["cat"]}, was_cancelled=True), task(4), {**task(4), "annotations": []}]
    tasks = [
        task(0, {"choices": ["cat"]}), task(1, {"choices": ["cannot_tell"]}, completed_by={"id": 9, "email": "x@y"}),
        twice, *skipped, task(90, {"number": 3}),
    ]  # fmt: skip
    tasks[0]["data"] |= {"source": "camera 3", "annotator": "nobody"}
    (tmp_path / "labels.json").write_text(json.dumps(tasks))
    labels = labels_of(log, read_answers(tmp_path / "labels.json"))
    assert parts(labels) == [
        ("r0", "label", "cat"), ("r1", "cannot_tell", None), ("r2", "label", "cat"), ("r90", "label", "3.0"),
    ]  # fmt: skip
    assert [each.source for each in labels] == ["label studio 4", "label studio 9", "label studio 4", "label studio 4"]
    assert labels[0].time == datetime(2026, 3, 2, 10, 0, 0, 500_000, UTC)
    assert labels[0].image_sha256 == digest(0)


def test_short_export_and_csv(log: Log, tmp_path: Path) -> None:
    rows = [
        {"request_id": "r0", "image_index": 0, "image_sha256": digest(0), "label": "dog", "annotator": 4},
        {"request_id": "r1", "image_index": 0, "image_sha256": digest(1), "label": "", "annotator": 4},
        {"request_id": "", "image_index": "", "image_sha256": digest(2), "label": "none_of_the_classes"},
        {"request_id": "r3", "image_index": 0, "image_sha256": digest(3), "label": " \t"},
    ]
    (tmp_path / "min.json").write_text(json.dumps(rows))
    with (tmp_path / "labels.csv").open("w", newline="") as file:
        lines = csv.DictWriter(file, list(rows[0]), restval="")
        lines.writeheader()
        lines.writerows(rows)
    text = (tmp_path / "labels.csv").read_text()
    (tmp_path / "semicolons.csv").write_text("\ufeff" + text.replace(",", ";"))  # as a spreadsheet in German saves it
    for name in ("min.json", "labels.csv", "semicolons.csv"):
        labels = labels_of(log, read_answers(tmp_path / name))
        assert parts(labels) == [("r0", "label", "dog"), (None, "none_of_the_classes", None)]


def test_two_answers_on_an_image_are_told(log: Log, tmp_path: Path) -> None:
    for folder, name in (("cat", "a.png"), ("cat", "b.png"), ("dog", "a.png")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_bytes(content(0))
    with pytest.raises(DataError, match=r"dog/a\.png: .*cat/a\.png says something else of this image"):
        labels_of(log, read_answers(tmp_path))
    with pytest.raises(DataError, match=r"line 3: .*line 2 says something else"):
        answered(log, tmp_path, f"request_id,image_index,image_sha256,label\nr0,0,,cat\n,,{digest(0)},dog\n")


@pytest.mark.parametrize("first", ["", "sep=;\n"])
def test_numbers_between_semicolons_may_have_decimal_commas(log: Log, tmp_path: Path, first: str) -> None:
    lines = "r90;0;12,5;2026-03-01\nr90;0;7.5;2026-03-02\n"
    found = answered(log, tmp_path, f"{first}request_id;image_index;label;updated_at\n{lines}")
    assert [each.label for each in found] == ["12.5", "7.5"]
    with pytest.raises(DataError, match="line 2: expected a number for angle, got '12,5'"):
        answered(log, tmp_path, 'request_id,image_index,label\nr90,0,"12,5"\n')


def test_folders_of_images(log: Log, tmp_path: Path) -> None:
    for folder, index in (("cat", 0), ("dog/deeper", 1), ("cannot_tell", 2)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / f"{index}.png").write_bytes(content(index))
    named = tmp_path / "none_of_the_classes" / "hedgehog"
    named.mkdir(parents=True)
    (named / "3.png").write_bytes(content(3))
    (named.parent / "4.png").write_bytes(content(4))
    (tmp_path / "cat" / "5.dib").write_bytes(content(5))  # As the log names what came as pixels.
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    with pytest.warns(UserWarning, match=r"1 files .*notes\.txt"):
        labels = labels_of(log, read_answers(tmp_path))
    assert [(each.image_sha256, each.kind, each.label) for each in labels] == [
        (digest(2), "cannot_tell", None), (digest(0), "label", "cat"), (digest(5), "label", "cat"),
        (digest(1), "label", "dog"), (digest(4), "none_of_the_classes", None),
        (digest(3), "none_of_the_classes", "hedgehog"),
    ]  # fmt: skip


def test_a_name_that_begins_the_digest_is_one(log: Log, tmp_path: Path) -> None:
    folder = tmp_path / "none_of_the_classes" / digest(3)[:2]
    folder.mkdir(parents=True)
    (folder / "3.png").write_bytes(content(3))
    (found,) = labels_of(log, read_answers(tmp_path))
    assert (found.kind, found.label) == ("none_of_the_classes", digest(3)[:2])


def test_folders_that_tools_add_are_no_answers(log: Log, tmp_path: Path) -> None:
    none = "none_of_the_classes"
    kept = ("no_label/images", "_unlabeled/images", "cat/psc/images", none, f"{none}/psc/images", f"{none}:hare/images")
    for index, folder in enumerate(kept):
        path = tmp_path / folder / digest(index)[:2] / f"{digest(index)}.png"  # as CVAT keeps a path
        path.parent.mkdir(parents=True)
        path.write_bytes(content(index))
    with pytest.warns(UserWarning, match="2 images in folders named no_label or _unlabeled have no label yet"):
        found = labels_of(log, read_answers(tmp_path))
    assert [(each.kind, each.label) for each in found] == [
        ("label", "cat"), (none, None), (none, None), (none, "hare")
    ]  # fmt: skip
    (tmp_path / "folder").mkdir()
    (tmp_path / "no_label").rename(tmp_path / "folder" / "no_label")
    with pytest.raises(DataError, match="1 images in folders named no_label or _unlabeled have no label yet; label"):
        labels_of(log, read_answers(tmp_path / "folder"))
    with pytest.raises(DataError, match="line 2: expected one of the model's classes"):
        answered(log, tmp_path, f"image_sha256,label\n{digest(0)},no_label\n")


def test_what_is_none_of_the_classes_may_have_a_name(log: Log, tmp_path: Path) -> None:
    lines = "".join(f"{digest(at)},{text}\n" for at, text in enumerate((
        "none_of_the_classes: hedgehog ", "none_of_the_classes:", "none_of_the_classes"
    )))  # fmt: skip
    found = answered(log, tmp_path, f"image_sha256,label\n{lines}")
    assert [(each.kind, each.label) for each in found] == [
        ("none_of_the_classes", "hedgehog"), ("none_of_the_classes", None), ("none_of_the_classes", None)
    ]  # fmt: skip


def test_a_class_of_the_bundle_that_answered_is_no_name(log: Log, tmp_path: Path) -> None:
    for line in (f",,{digest(0)},none_of_the_classes: cat", "r0,0,,none_of_the_classes:cat"):
        with pytest.raises(DataError, match=r"line 2: 'cat' is a class of the model that answered; send kind=label"):
            answered(log, tmp_path, f"request_id,image_index,image_sha256,label\n{line}\n")
    named = tmp_path / "named" / "none_of_the_classes" / "dog"
    named.mkdir(parents=True)
    (named / "0.png").write_bytes(content(0))
    with pytest.raises(DataError, match="'dog' is a class of the model that answered"):
        labels_of(log, read_answers(tmp_path / "named"))
    # The class was added since, and the image was sent again: what was said before is taken.
    put_rows(log, [row(50, bundle_version="v2", image_sha256=digest(0), image_path=None)], day="2026-03-02")
    log.put(model_path("v2"), LoggedModel("v2", Classification(), ("cat", "dog", "hedgehog")).to_json())
    lines = [f",,{digest(0)},none_of_the_classes:hedgehog", "r0,0,,none_of_the_classes:hedgehog"]
    found = answered(log, tmp_path, "\n".join(["request_id,image_index,image_sha256,label", *lines, ""]))
    assert [(each.kind, each.label) for each in found] == [("none_of_the_classes", "hedgehog")] * 2
    with pytest.raises(DataError, match="'hedgehog' is a class of the model that answered"):
        answered(log, tmp_path, "request_id,image_index,label\nr50,0,none_of_the_classes:hedgehog\n")


def test_words_for_kinds_of_answers_name_nothing(log: Log, tmp_path: Path) -> None:
    for word in ("cannot_tell", "none_of_the_classes"):
        with pytest.raises(DataError, match=f"line 2: expected a name, got '{word}'"):
            answered(log, tmp_path, f"image_sha256,label\n{digest(0)},none_of_the_classes:{word}\n")
    with pytest.raises(DataError, match="expected a name, got 'cannot_tell'"):
        rename(log, "m", "cat", "cannot_tell")


def test_image_of_two_models_is_labelled_for_the_one_that_could_have_said_it(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 2)
    put_rows(log, [row(0, request_id="r50", bundle_version="d1")], model="digits")
    log.put(model_path("d1"), LoggedModel("d1", Classification(), ("0", "1")).to_json())

    def read(label: str, model: str | None = None) -> list[tuple[str | None, str | None]]:
        found = answered(log, tmp_path, f"image_sha256,label\n{digest(0).upper()},{label}\n", model)
        return [(each.model, each.label) for each in found]

    assert read("cat") == [("m", "cat")]
    assert read("none_of_the_classes") == [("digits", None), ("m", None)]
    assert read("none_of_the_classes", "m") == [("m", None)]
    for label, model in (("4", None), ("cat", "digits")):
        with pytest.raises(DataError, match="line 2"):
            read(label, model)
    with pytest.raises(UsageError, match="no rows of model shoes"):
        read("cat", "shoes")
    task = f"request_id,image_index,image_sha256,label\nr0,0,{digest(0)},cannot_tell\n"
    found = answered(log, tmp_path, task)  # Of a review, whose lines name a row too.
    assert {(each.model, each.request_id, each.image_sha256) for each in found} == {
        ("m", "r0", digest(0)), ("digits", None, digest(0)),
    }  # fmt: skip


def test_a_number_is_that_of_the_model_which_its_line_names(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 0)
    add_values(log)
    add_values(log, "w")
    text = "request_id,image_index,image_sha256,model,label\n" + "".join(
        f"r90,0,{digest(90)},{model},{number}\n" for model, number in (("v", 40), ("w", 3))
    )  # fmt: skip
    for model, expected in ((None, [("v", "40.0"), ("w", "3.0")]), ("w", [("w", "3.0")])):
        found = answered(log, tmp_path, text, model)
        assert [(each.model, each.label) for each in found] == expected
    with pytest.raises(DataError, match="line 2: expected a number"):
        answered(log, tmp_path, text.replace(",v,40", ",v,cat"))
    with pytest.warns(UserWarning, match="1 of 2 answers are on images without a row in the log: .*line 2 is"):
        assert [each.model for each in answered(log, tmp_path, text.replace(",v,40", ",m,40"))] == ["w"]


@pytest.mark.parametrize("digests", [(digest(2), digest(1)), ("", "")])  # Without one a line is still of its row's.
def test_labels_on_images_that_are_not_stored_are_told(tmp_path: Path, digests: tuple[str, str]) -> None:
    log = make_log(tmp_path / "log", 2)
    put_rows(log, [row(2, image_path=None), row(3, image_path=None, image_sha256=digest(1))])
    lines = "".join(f"r{at},0,{sha256},cat\n" for at, sha256 in zip((0, 2, 3), ("", *digests), strict=True))
    with pytest.warns(UserWarning, match="1 of 3 labels are on images that are not stored"):  # The last one is, of r1.
        assert len(answered(log, tmp_path, f"request_id,image_index,image_sha256,label\n{lines}")) == 3


def test_a_class_that_was_added_may_be_said_of_images_from_before(tmp_path: Path) -> None:
    log = make_log(tmp_path / "log", 2)
    put_rows(log, [row(2, bundle_version="v2")], day="2026-03-02")
    put_rows(log, [row(0, bundle_version="o1")], model="other")
    for version, classes in (("v2", ("cat", "hound", "hare")), ("o1", ("lion",))):
        log.put(model_path(version), LoggedModel(version, Classification(), classes).to_json())
    found = answered(log, tmp_path, "request_id,image_index,label\nr0,0,hare\nr1,0,dog\n")
    assert parts(found) == [("r0", "label", "hare"), ("r1", "label", "dog")]
    with pytest.raises(DataError, match=r"line 2: expected one of the model's classes \(cat, dog\), got 'lion'"):
        answered(log, tmp_path, "request_id,image_index,label\nr1,0,lion\n")


def test_labels_have_the_digest_of_their_row(tmp_path: Path) -> None:
    """An image that was erased stays erased, whatever a file of answers still says of it."""
    log = make_log(tmp_path / "log", 2)
    erase(log, digest(1))
    head = "request_id,image_index,image_sha256,label\n"
    with pytest.warns(UserWarning, match="1 of 2 labels are on images that are not stored"):
        labels = answered(log, tmp_path, f"{head}r0,0,,cat\nr1,0,{digest(1)},cat\n")
    assert [(each.model, each.image_sha256) for each in labels] == [("m", digest(0)), ("m", None)]
    with pytest.raises(DataError, match=f"line 2: the row is of the image {digest(0)}, not of {digest(1)}"):
        answered(log, tmp_path, f"{head}r0,0,{digest(1)},cat\n")


def test_clock_that_is_ahead_does_not_win_for_ever(log: Log, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([task(0, {"choices": ["cat"]}, updated_at="9999-01-01T00:00:00Z")]))
    (label,) = labels_of(log, read_answers(tmp_path / "x.json"))
    assert label.time <= datetime.now(UTC)


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("x.csv", "request_id,image_index,label\nr0,0,dgo\n", "line 2"),
        ("x.csv", "request_id,image_index,label\nr0,0,cat\nr0,x,cat\n", "line 3"),
        ("x.csv", "request_id,image_index,label\nr0,0\n", "line 2"),
        ("x.csv", "request_id,image_index,label\nr0,0,cat,4\n", "line 2"),
        ("x.csv", "request_id,image_index,label\nr77,0,cat\n", "line 2"),
        ("x.csv", "image_sha256,label\nabc,cat\n", r"x\."),
        ("x.csv", "image_sha256,label\n,cat\n", "line 2"),
        ("x.csv", "image,label\nx,cat\n", r"x\."),
        ("x.csv", "request_id,image_index,label;\nr0,0,;cat\n", "with the comma as separator"),
        ("x.csv", "", r"x\."),
        ("x.csv", 'image_sha256,label\n"ab', "line 2"),
        ("x.json", "", r"x\."),
        ("x.json", "[" * 100_000, r"x\."),
        ("x.json", "{}", r"x\."),
        ("x.json", "[3]", "task 1"),
        ("x.json", '[{"annotations": 3}]', "task 1"),
        ("x.json", json.dumps([task(0, {"choices": ["cat", "dog"]})]), "task 1"),
        ("x.json", json.dumps([task(0, {"choices": [["cat"]]})]), "task 1"),
        ("x.json", json.dumps([task(90, {"number": "a"})]), "task 1"),
        ("x.txt", "", r"x\."),
        ("x.csv/a.png", "", r"x\."),
    ],
)
def test_broken_answers_are_named(log: Log, tmp_path: Path, name: str, text: str, place: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    with pytest.raises(DataError, match=place):
        labels_of(log, read_answers(tmp_path / name.split("/")[0]))


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["r0", "cat", "dog"])
ANYTHING = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=6)
NAMES = st.sampled_from(
    ["request_id", "image_index", "image_sha256", "label", "annotations", "data", "annotator", "updated_at", "source"]
)


def broken(whole: Any) -> st.SearchStrategy[Any]:
    """The same document with any part of it replaced by anything."""
    if isinstance(whole, dict):
        parts = st.fixed_dictionaries({name: broken(part) for name, part in whole.items()})
    elif isinstance(whole, list):
        parts = st.tuples(*map(broken, whole)).map(list)
    else:
        return st.one_of(st.just(whole), st.just(whole), ANYTHING)
    return st.one_of(parts, parts, parts, ANYTHING)


@pytest.mark.filterwarnings("ignore:.*without a row in the log")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.one_of(broken([task(0, {"choices": ["cat"]})]), st.lists(st.dictionaries(NAMES, ANYTHING))))
def test_any_json_is_read_or_refused(log: Log, tmp_path: Path, document: Any) -> None:
    file = tmp_path / "x.json"
    file.write_text(json.dumps(document))
    read_or_refused(log, file)


@pytest.mark.filterwarnings("ignore:.*without a row in the log")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    st.sampled_from([b"", b"request_id,image_index,label,source\n", b"image_sha256,label\n", b"\xef\xbb\xbf"]),
    st.binary() | st.text('r01,"\n\r\0cat', max_size=40).map(str.encode),
)
def test_any_csv_is_read_or_refused(log: Log, tmp_path: Path, head: bytes, body: bytes) -> None:
    file = tmp_path / "x.csv"
    file.write_bytes(head + body)
    read_or_refused(log, file)


def read_or_refused(log: Log, file: Path) -> None:
    try:
        labels = labels_of(log, read_answers(file))
    except DataError as error:
        assert str(file) in str(error)
        return
    for label in labels:
        of_row = label.request_id in {f"r{n}" for n in (*range(6), 90)}
        assert of_row or (label.request_id is None and label.image_sha256 == digest(0))  # Its request was left out.
        assert label.model in {"m", "v"} and label.source.encode()
