"""The newest images that were not accepted and that nobody reviewed."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from psc_core.answers import CLASSIFICATION_SCORES
from psc_core.errors import DataError
from psc_core.log.labels import CANNOT_TELL, Label, write_labels
from psc_core.log.review import UnreviewedImages
from psc_core.log.store import Log
from tests.psc_core.log.support import TIME, add_values, digest, make_log, put_rows, row

FAR = 3600.0


def abstained(index: int, **changes: object) -> dict[str, object]:
    return row(index, **{"decision": "abstain_ood", "time": TIME + timedelta(seconds=index), **changes})


def names(log: Log, limit: int = 100, seconds: float = FAR) -> list[str]:
    return [each.row["request_id"] for each in UnreviewedImages(log).newest(limit=limit, seconds=seconds)]


def review(log: Log, request_id: str | None, sha256: str | None, model: str | None = "m") -> None:
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
    first = UnreviewedImages(log).newest(limit=1, seconds=FAR)[0]
    assert (first.model, set(first.scores)) == ("m", set(CLASSIFICATION_SCORES)) and "probabilities" not in first.row


def test_what_was_reviewed_erased_or_not_stored_is_skipped(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    same = {"image_sha256": digest(1), "image_path": f"images/{digest(1)[:2]}/{digest(1)}.png"}
    rows = [abstained(index) for index in range(5)]
    repeated = [abstained(index, **same) for index in (6, 7)]
    strange = [abstained(8, image_path=None), abstained(9, image_sha256=None), abstained(10, image_path="../secret")]
    put_rows(log, rows)
    for index, each in enumerate((*repeated, *strange)):
        put_rows(log, [{**each, "request_id": "r1"}], day=f"2026-02-0{index + 1}")  # The images are those of r1.
    assert names(log) == ["r4", "r3", "r2", "r1", "r0"]
    review(log, "r3", None)
    review(log, None, digest(0))
    review(log, "elsewhere", digest(1), model="other")  # Another model may have other classes.
    review(log, "elsewhere", digest(1), model=None)
    assert names(log) == ["r4", "r2", "r1"]
    review(log, "elsewhere", digest(1))  # The same bytes in another request.
    review(log, "r4", None)
    assert names(log) == ["r2"]
    assert names(make_log(tmp_path / "empty", 0)) == []


def test_labels_are_read_once_and_as_time_allows(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(index) for index in range(4)])
    images, got = (
        UnreviewedImages(log),
        lambda: [each.row["request_id"] for each in images.newest(limit=9, seconds=FAR)],
    )
    review(log, "r3", digest(3))
    assert got() == ["r2", "r1", "r0"]
    log.put("labels/part-1.parquet", b"PAR1 torn")
    with pytest.raises(DataError):
        got()
    log.delete("labels/part-1.parquet")
    (known,) = (name for name, _ in log.names("labels"))
    log.put(known, b"PAR1 torn")  # It is not looked at again.
    review(log, None, digest(1))
    assert got() == ["r2", "r0"] and images.newest(limit=9, seconds=-1.0) == []


def test_chunks_of_reviewed_ones_hide_none_behind_them(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(index) for index in range(1100)])
    write_labels(log, [Label(f"r{n}", 0, digest(n), CANNOT_TELL, None, "test", TIME) for n in range(3, 1100)])
    assert names(log) == ["r2", "r1", "r0"]


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    log = make_log(tmp_path, 0)
    put_rows(log, [abstained(1)])
    log.put("labels/part-1.parquet", b"PAR1 torn")
    with pytest.raises(DataError, match="a file of labels that cannot be read"):
        names(log)
    log.delete("labels/part-1.parquet")
    log.put("model=m/day=2026-03-01/part-z.parquet", b"PAR1 torn")
    with pytest.raises(DataError, match=r"part-z\.parquet is not a file of rows"):
        names(log)
