"""The reviewed part of a random sample."""

from __future__ import annotations

from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core.calibrate import LoggedLabel, read_outside, read_sample, reviewed_of
from psc_core.errors import DataError, UsageError
from psc_core.log.labels import label_files, read_label_file, write_labels
from psc_core.log.store import open_log
from psc_core.model import FittedModel, load_model
from tests.logged import NOW, Logged, png, write_log


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> FittedModel:
    return load_model(tiny_bundle, device="cpu", allow_factories=["tests.tiny:network"])


def picture(number: int) -> bytes:
    return png(np.full((28, 28), number, np.uint8))


def test_images_of_a_class_calibrate_and_the_others_are_told_apart(model: FittedModel, tmp_path: Path) -> None:
    images = [Logged(picture(i), "label", str(i % 10), sample_probability=0.5 if i % 2 else 0.1) for i in range(20)]
    images += [Logged(picture(20), "none_of_the_classes"), Logged(picture(21), "cannot_tell")]
    images += [Logged(picture(22), "label", "3", sampled=False), Logged(picture(23), "label", "3", stored=False)]
    images += [images[0]] * 5  # An image counts once.
    sample = read_sample(write_log(tmp_path, images), model)
    assert {name: len(data) for name, data in sample.others.items()} == {"none_of_the_classes": 1, "cannot_tell": 1}
    assert (len(sample.of_class), sample.logged, sample.days) == (20, 22, ("2026-11-20", "2026-11-20"))
    shown = [int(sample.of_class.image(i)[0, 0, 0]) for i in range(20)]
    assert sorted(shown) == list(range(20)) != shown  # in the order of their digests
    assert sample.of_class.first_labels().tolist() == [i % 10 for i in shown]
    assert sample.weights.tolist() == [2.0 if i % 2 else 10.0 for i in shown]
    part = sample.at(torch.tensor([3, 1]))
    assert part.weights.tolist() == sample.weights[[3, 1]].tolist() and len(part.of_class) == 2


def test_the_last_verdict_on_an_image_counts_whichever_row_is_read_last(model: FittedModel, tmp_path: Path) -> None:
    """Files of rows have random names; days do not, so the label that is read last is the earlier one here."""
    later = NOW + timedelta(days=1)
    for name, with_model in (("new", True), ("old", False)):
        log = write_log(tmp_path / name, [
            Logged(picture(0), "label", "1", day="2026-11-20", label_time=later),
            Logged(picture(0), "label", "2", day="2026-11-21"),
            Logged(picture(0), day="2026-11-22"),
        ])  # fmt: skip
        if not with_model:  # As labels were written before they had the column.
            ((file, _),) = label_files(log)
            write_labels(log, [replace(each, model=None) for each in read_label_file(log, file)], file)
        assert read_sample(log, model).of_class.first_labels().tolist() == [1]


def test_days_are_chosen(model: FittedModel, tmp_path: Path) -> None:
    images = [Logged(picture(i), "label", "1", day=f"2026-11-{10 + i}") for i in range(5)]
    log = write_log(tmp_path, images)
    sample = read_sample(log, model, "digits", since="2026-11-11", until="2026-11-12")
    assert (len(sample.of_class), sample.days) == (2, ("2026-11-11", "2026-11-12"))
    with pytest.raises(UsageError, match="no logged sampled images of digits; serve with --log-sample"):
        read_sample(log, model, since="2026-12-01")


def test_any_part_of_the_images_is_of_all_days(model: FittedModel, tmp_path: Path) -> None:
    """In the order of days the first quarter, which may choose a temperature, would be the oldest images."""
    images = [Logged(picture(i), "label", str(i // 20), day=f"2026-11-{10 + i // 20}") for i in range(60)]
    first = read_sample(write_log(tmp_path, images), model).of_class.first_labels()[:15]
    assert set(first.tolist()) == {0, 1, 2}


def test_reviewed_images_count_in_the_order_of_digests() -> None:
    """Whoever reviews what looks interesting leaves gaps in it."""
    monday, tuesday = date(2026, 11, 23), date(2026, 11, 24)

    def image(number: int, day: date, *, reviewed: bool) -> LoggedLabel:
        return LoggedLabel(day, f"{number:064x}", "", 0.1, "label" if reviewed else None, "1")

    images = [image(i, monday, reviewed=i < 40 or i % 3 == 0) for i in range(100)]
    new = [image(i, tuesday, reviewed=i < 10) for i in range(50)]  # They take nothing from the day before.
    found = reviewed_of([*images, *new][::-1])
    assert [(each.day, int(each.sha256, 16)) for each in found] == [
        *((monday, i) for i in [*range(40), 42]), *((tuesday, i) for i in range(10))
    ]  # fmt: skip
    assert len(reviewed_of([image(i, monday, reviewed=i != 30) for i in range(40)])) == 39
    assert reviewed_of([image(i, monday, reviewed=i > 0) for i in range(10)]) == []


def test_labels_of_other_images_are_not_enough(model: FittedModel, tmp_path: Path) -> None:
    chosen = [Logged(picture(i), "label", "1", sampled=False) for i in range(5)]
    log = write_log(tmp_path, [*chosen, *(Logged(picture(10 + i)) for i in range(5))])
    with pytest.raises(
        UsageError, match=r"of the 5 sampled images .* 0 are reviewed and none .* psc-log review --sample"
    ):
        read_sample(log, model)


def test_names_and_classes_that_are_not_there(model: FittedModel, tmp_path: Path) -> None:
    write_log(tmp_path, [Logged(picture(0), "label", "cat")])
    write_log(tmp_path, [Logged(picture(1))], model="other")
    log = open_log(tmp_path)
    with pytest.raises(DataError, match="no classes of the model: cat; review these images again"):
        read_sample(log, model, "digits")
    with pytest.raises(UsageError, match="rows of several models; it has digits, other, name one by --model"):
        read_sample(log, model)
    with pytest.raises(UsageError, match="no rows of model shoes; it has digits, other"):
        read_sample(log, model, "shoes")
    with pytest.raises(UsageError, match="has no rows; give the folder"):
        read_sample(open_log(tmp_path / "empty"), model)


def test_numbers_of_a_regression(angle_bundle: Path, tmp_path: Path) -> None:
    model = load_model(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    sample = read_sample(write_log(tmp_path, [Logged(picture(0), "label", "-12.5")]), model)
    assert sample.of_class.values is not None and sample.of_class.values.tolist() == [-12.5]
    assert sample.of_class.target == model.task.number()


def test_reviewed_images_outside_the_slice(model: FittedModel, tmp_path: Path) -> None:
    outside = [Logged(picture(i), "label", str(i), sampled=False) for i in range(5)]
    others = [
        Logged(picture(5), "none_of_the_classes", sampled=False),
        Logged(picture(6), sampled=False),
        Logged(picture(7), "label", "7", sampled=False, stored=False),
        Logged(picture(0), "label", "0"),  # the bytes of an image outside, once more and in the slice
        Logged(picture(8), "label", "8"),
        Logged(picture(1), "label", "1", sampled=False),
    ]
    data = read_outside(write_log(tmp_path / "some", [*outside, *others]), model)
    assert sorted(data.labels.tolist()) == [1, 2, 3, 4] == sorted(int(data.image(i).max()) for i in range(4))
    log = write_log(tmp_path / "none", others[:5])
    with pytest.raises(
        UsageError, match=r"of the 2 logged images of digits in .* outside the random sample 1 are reviewed"
    ):
        read_outside(log, model)
