"""What people should look at first: all lists take turns, and each image says from which it came."""

from __future__ import annotations

import math
from collections import Counter
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from psc_core.log.labels import Label, Labels
from psc_core.log.review import DIVERSE, NEAR, SAMPLE, STRANGE, review
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
        ("r7", SAMPLE), ("r11", NEAR), ("r3", STRANGE), ("r5", DIVERSE),
    ]  # fmt: skip
    assert [each.row["request_id"] for each in chosen if each.reason == NEAR][:2] == ["r11", "r12"]
    assert sorted(ids(chosen)) == sorted(each["request_id"] for each in rows)
    assert [each.row["request_id"] for each in chosen if each.is_sampled] == ["r7"]
    counts = Counter(each.reason for each in chosen)
    assert counts[SAMPLE] == 1 and {counts[NEAR], counts[STRANGE], counts[DIVERSE]} <= {6, 7}
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
    assert review(log, labels, model="none") == []
    again = Labels([Label("r1", 0, digest(1), "cannot_tell", None, "x", TIME, model="m")])
    assert sorted(ids(review(log, again))) == ["r0", "r2", "r90"]  # Nor the same bytes, in r8.


def test_the_audit_slice_alone_is_in_the_order_of_its_digests(tmp_path: Path) -> None:
    """Who stops anywhere has reviewed a random part of each day."""
    log = make_log(tmp_path, 0)
    days = [TIME, TIME + timedelta(days=1)]
    put_rows(log, [row(n, sampled=n % 3 > 0, time=days[n % 2] + timedelta(seconds=n)) for n in range(20)])
    expected = sorted((n for n in range(20) if n % 3 > 0), key=lambda n: (-(n % 2), digest(n)))
    chosen = review(log, Labels(), sampled=True)
    assert ids(chosen) == [f"r{n}" for n in expected] and {each.reason for each in chosen} == {SAMPLE}
    assert ids([each for each in review(log, Labels()) if each.reason == SAMPLE])[0] == f"r{expected[0]}"
