import hashlib
import json
import math
import re
from collections import Counter
from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core import calibrate as recalibrate
from psc_core.bundle import HISTORY
from psc_core.calibrate import (
    LARGEST_LOSS,
    TIMES,
    Recalibrated,
    draw_quarter,
    extend_pipeline,
    recalibrate_from_sample,
    seen_examples,
    with_class,
)
from psc_core.cli.fit import main as fit
from psc_core.cli.log import main as log_cli
from psc_core.data.dataset import ImageDataset
from psc_core.errors import DataError, UsageError
from psc_core.evaluation.classification import ClassificationEvaluator
from psc_core.heads.softmax import TemperatureHead
from psc_core.log.labels import label_files, read_label_file, write_labels
from psc_core.log.sample import (
    LoggedLabel,
    Sample,
    read_named,
    read_outside,
    read_sample,
    read_unknown,
    reviewed_of,
    unknown_of,
)
from psc_core.log.store import Log, open_log
from psc_core.metrics import Difference
from psc_core.model import PSC, FittedModel, load_model
from psc_core.pipeline import Pipeline
from psc_core.scoring import dataset_outputs
from psc_core.stored_images import StoredImages
from tests.conftest import ROOT, TinyJob
from tests.logged import NOW, Logged, labelled, plain, png, write_log
from tests.opened import loaded, opened
from tests.reference import calibration as naive
from tests.second_reader import SecondReader

FACTORY = "tests.tiny:network"


@pytest.fixture(scope="module")
def model(tiny_bundle: Path) -> FittedModel:
    return loaded(tiny_bundle)


@pytest.fixture(scope="module")
def digits() -> ImageDataset:
    return opened("mnist")


@pytest.fixture(scope="module")
def log(digits: ImageDataset, tmp_path_factory: pytest.TempPathFactory) -> Log:
    images = labelled(digits, 200)
    clothes = opened("fashion-mnist")
    images += [Logged(plain(clothes, i), "none_of_the_classes") for i in range(5)]
    return write_log(tmp_path_factory.mktemp("log"), images)


@pytest.fixture(scope="module")
def sample(log: Log, model: FittedModel) -> Sample:
    return read_sample(log, model)


def test_only_the_calibration_is_another(model: FittedModel, sample: Sample, tmp_path: Path) -> None:
    found = recalibrate_from_sample(model, sample, {"risk": 0.9})
    new = found.model
    images = next(sample.of_class.batches(len(sample.of_class))).images
    before, after = model.predict(images), new.predict(images)
    for name in ("predictive_entropy", "log_density", "ood_score", "probabilities"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    scores = after.ood_score.tolist()
    exact = [naive.weighted_p_value(scores, [1] * len(scores), score) for score in scores]
    torch.testing.assert_close(after.ood_p_value, torch.tensor([float(p) for p in exact]))
    assert new.calibration.ood_scores.tolist() == sorted(scores)
    is_ood = torch.tensor([decision == "abstain_ood" for decision in after.decision])
    assert int(is_ood.sum()) <= new.policy.alpha * (len(scores) + 1)
    assert "200 of a class, 5 none_of_the_classes" in sample.summary()
    assert "2.4 to 8.4%" in found.lines[1]  # quantiles of Beta(10, 191)
    manifest = new.save(tmp_path / "bundle")
    assert manifest.version != model.version and found.warnings == ()
    again = loaded(tmp_path / "bundle")
    assert torch.equal(again.predict(images).ood_p_value, after.ood_p_value)
    twice = recalibrate_from_sample(again, sample, {}).model.report["provenance"]
    assert [entry["from"] for entry in twice[HISTORY]] == [model.version, manifest.version]
    assert twice[HISTORY][0]["labels"] == twice[HISTORY][0]["effective_sample_size"] == 200
    assert twice["train"] == model.report["provenance"]["train"]


def test_images_drawn_rarely_count_more(model: FittedModel, sample: Sample) -> None:
    rare = torch.arange(200) % 2 == 0
    uneven = replace(sample, weights=torch.where(rare, 20.0, 2.0).double())
    assert "200 of a class, which count as 110 drawn equally, 5 none" in uneven.summary()
    new = recalibrate_from_sample(model, uneven, {}).model
    assert len(new.calibration) == 110 == new.report["provenance"][HISTORY][-1]["effective_sample_size"]
    scores = new.compute(next(sample.of_class.batches(200)).images)["ood_score"]
    assert float(new.calibration.ood_scores.median()) == pytest.approx(float(scores[rare].median()), rel=0.2)


def test_the_rates_before_are_weighted_too(model: FittedModel, sample: Sample) -> None:
    is_ood = model.predict(next(sample.of_class.batches(200)).images).is_ood
    assert 0 < int(is_ood.sum()) < 200
    uneven = replace(sample, weights=torch.where(is_ood, 20.0, 5.0).double())
    rate = float(uneven.weights[is_ood].sum() / uneven.weights.sum())
    lines = recalibrate_from_sample(model, uneven, {}).lines
    assert any(f"on sampled images of a class: {rate:.1%} before" in line for line in lines)


def test_refuses_rates_that_the_images_cannot_keep(model: FittedModel, sample: Sample) -> None:
    few = sample.at(torch.arange(30))
    with pytest.raises(UsageError, match=r"alpha ≥ .* with n = 30 .* at least 99 images"):
        recalibrate_from_sample(model, few, {"alpha": 0.01})
    with pytest.raises(UsageError, match=r"coverage ≤ .* with n = 30 .* at least 99 images"):
        recalibrate_from_sample(model, few, {"coverage": 0.99})
    with pytest.raises(UsageError, match="calibration of a classifier does not read max_width"):
        recalibrate_from_sample(model, few, {"max_width": 2.0})


def test_a_risk_that_cannot_be_shown(model: FittedModel, sample: Sample) -> None:
    """Of the dimmed digits nearly all are wrong; where the model is right, the risk of a fit takes thousands."""
    assert "NOTHING IS ACCEPTED" in recalibrate_from_sample(model, sample, {}).lines[0]
    predicted = model.decide(model.outputs(dataset_outputs(model, sample.of_class, "").packed.numpy())).class_index
    right = replace(sample, of_class=replace(sample.of_class, labels=torch.from_numpy(predicted)))
    asked = model.report | {"metrics": {**model.report["metrics"], "risk_asked": 0.001}}
    found = recalibrate_from_sample(replace(model, report=asked), right, {})
    assert found.model.policy.risk == 0.05
    assert found.lines[0].startswith("of clear images like the calibration images at most 5 %")
    with pytest.raises(UsageError, match=r"risk of 0\.001 cannot be shown"):
        recalibrate_from_sample(model, right, {"risk": 0.001})


@pytest.fixture(scope="module")
def original(tiny_job: TinyJob, tmp_path_factory: pytest.TempPathFactory) -> FittedModel:
    """The network's own predictions."""
    bundle = tmp_path_factory.mktemp("original") / "bundle"
    assert fit([*tiny_job.args, "--predictions", "original", "--no-report", "--out", str(bundle)]) == 0
    return loaded(bundle)


def test_original_predictions_get_another_temperature(original: FittedModel, sample: Sample) -> None:
    head = original.pipeline.scorer.head
    assert isinstance(head, TemperatureHead)
    sharp = TemperatureHead(
        {"temperature": head.temperature / 20}, record={"temperature": float(head.temperature) / 20}
    )
    pipeline = type(original.pipeline)(
        original.pipeline.scorer.replace(head=sharp), original.pipeline.calibration_scores, original.pipeline.checks
    )
    found = recalibrate_from_sample(replace(original, pipeline=pipeline), sample, {})
    fitted = found.model.pipeline.scorer.head
    assert float(fitted.temperature) > 5 * float(sharp.temperature)
    assert fitted.record["temperature"] == pytest.approx(float(fitted.temperature))
    assert len(found.model.calibration) == 150 and "by 50 images, which do not calibrate" in found.lines[1]
    checks, fitted_again = original.pipeline.checks, found.model.pipeline.checks
    assert checks is not None and fitted_again is not None
    assert "confidence" not in checks.names  # Of ambiguous digits: no check reads the temperature.
    assert torch.equal(checks.ascending, fitted_again.ascending) and torch.equal(checks.scales, fitted_again.scales)


@pytest.mark.parametrize("rare", [60, 2])
def test_a_temperature_stays_where_few_images_choose_it(original: FittedModel, sample: Sample, rare: int) -> None:
    few = sample.at(torch.arange(60)) if rare == 60 else sample
    weights = torch.where(torch.arange(len(few.of_class)) < rare, 50.0, 1.0).double()
    new = recalibrate_from_sample(original, replace(few, weights=weights), {"alpha": 0.3, "coverage": 0.7}).model
    assert new.pipeline.scorer.head is original.pipeline.scorer.head
    assert new.report["provenance"][HISTORY][-1]["calibrated_on"] == len(few.of_class)


@pytest.mark.parametrize("count", [1, 2])
def test_one_or_two_images_are_refused(original: FittedModel, sample: Sample, digits: ImageDataset, count: int) -> None:
    few = sample.at(torch.arange(count))
    with pytest.raises(UsageError, match=rf"with n = {count}"):
        recalibrate_from_sample(original, few, {})
    with pytest.raises(UsageError, match=r"a quarter of the sampled images .* at least 100 of these drawn"):
        recalibrate_from_sample(original, few, {}, digits.subset(torch.arange(3)))


def test_intervals_of_a_regression(angle_bundle: Path, tmp_path: Path) -> None:
    model = loaded(angle_bundle)
    sample = read_sample(write_log(tmp_path, labelled(opened("rotated-mnist"), 60)), model)
    recalibrated = recalibrate_from_sample(model, sample, {})
    new, before = recalibrated.model, model.predict(next(sample.of_class.batches(60)).images).interval
    held = ((sample.of_class.values >= before[:, 0]) & (sample.of_class.values <= before[:, 1])).double()
    widths = (each.calibration.quantile(each.policy.coverage) for each in (model, new))
    assert (
        "{:.0%} of the intervals held; half-width {:.3g} → {:.3g} standard deviations".format(held.mean(), *widths)
        in recalibrated.lines
    )
    assert any("on sampled images with a number" in line for line in recalibrated.lines)
    found = new.predict(next(sample.of_class.batches(60)).images)
    low, high = found.interval.double().unbind(1)
    values = sample.of_class.values
    assert values is not None
    inside = (values >= low - 1e-3) & (values <= high + 1e-3)
    assert int(inside.sum()) >= 55  # ⌈61 · 0.9⌉
    uneven = replace(sample, weights=torch.where(held > 0, 2.0, 5.0).double())
    rate = float((held * uneven.weights).sum() / uneven.weights.sum())
    lines = recalibrate_from_sample(model, uneven, {}).lines
    assert (
        any(line.startswith(f"{rate:.0%} of the intervals held") for line in lines)
        and f"{rate:.0%}" != f"{held.mean():.0%}"
    )


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


def test_the_last_label_on_an_image_counts_whichever_row_is_read_last(model: FittedModel, tmp_path: Path) -> None:
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


def noon(day: date) -> datetime:
    return datetime.combine(day, time(12), UTC)


def test_reviewed_images_count_in_the_order_of_digests() -> None:
    """Whoever reviews what looks interesting leaves gaps in it."""
    monday, tuesday = date(2026, 11, 23), date(2026, 11, 24)

    def image(number: int, day: date, *, reviewed: bool) -> LoggedLabel:
        return LoggedLabel(noon(day), f"{number:064x}", "", 0.1, "label" if reviewed else None, "1")

    images = [image(i, monday, reviewed=i < 40 or i % 3 == 0) for i in range(100)]
    new = [image(i, tuesday, reviewed=i < 20) for i in range(50)]  # They take nothing from the day before.
    found = reviewed_of([*images, *new][::-1])
    assert [(each.day, int(each.sha256, 16), each.probability) for each in found] == [
        *((monday, i, 0.1 * 0.43) for i in [*range(40), 42]), *((tuesday, i, 0.1 * 0.42) for i in range(20))
    ]  # fmt: skip
    assert len(reviewed_of([image(i, monday, reviewed=i != 30) for i in range(40)])) == 39
    assert reviewed_of([image(i, monday, reviewed=i > 0) for i in range(10)]) == []


def test_a_day_that_goes_on_after_its_review_keeps_its_labels() -> None:
    """Later images have digests between the labelled ones; whether they are labelled from the top or not at all."""
    day, draw = noon(date(2026, 11, 23)), np.random.default_rng(3)
    digests = [f"{number:064x}" for number in draw.permutation(250)]
    found = [LoggedLabel(day + timedelta(seconds=at), sha256, "", 0.1, None, "1") for at, sha256 in enumerate(digests)]
    first = [replace(each, kind="label" if at < 200 else None) for at, each in enumerate(found)]
    reviewed = reviewed_of(first)
    assert len(reviewed) == 200 and {each.probability for each in reviewed} == {0.1 * (200 / 250)}  # for the whole day
    more = sorted(digests[200:])[:10]
    assert len(reviewed_of([replace(each, kind="label") if each.sha256 in more else each for each in first])) >= 200
    chosen = [replace(each, kind="label" if draw.random() < 0.5 else None) for each in found]
    assert len(reviewed_of(chosen)) == 0  # No time suits them.


@pytest.mark.parametrize(("drawn", "chosen"), [(5, 0.1), (5, 0.3), (20, 0.1), (50, 0.02), (50, 0.1), (50, 0.3)])
def test_days_whose_first_images_were_chosen_do_not_add_up(drawn: int, chosen: float) -> None:
    draw, first = np.random.default_rng(0), noon(date(2026, 1, 1))
    images = [
        LoggedLabel(
            first + timedelta(days=day, seconds=at), f"{draw.integers(1 << 62):064x}", "", 0.1,
            "label" if draw.random() < chosen else None, "1",
        )
        for day in range(200) for at in range(drawn)
    ]  # fmt: skip
    assert len(reviewed_of(images)) < 10


@given(st.lists(st.tuples(st.integers(1, 18), st.integers(0, 18)), min_size=1, max_size=6))
def test_the_days_that_count_make_the_most_of_the_labels(counts: list[tuple[int, int]]) -> None:
    """Of days drawn equally, m is their smallest reviewed share times the images that were drawn on them."""
    days = {date(2026, 11, 1 + at): (drawn, min(drawn, reviewed)) for at, (drawn, reviewed) in enumerate(counts)}
    shares = {
        day: Fraction(reviewed, drawn)
        for day, (drawn, reviewed) in days.items()
        if reviewed == drawn or math.comb(drawn, reviewed) >= 1000  # or others may have been the first
    }
    effective = {
        smallest: math.floor(smallest * sum(days[day][0] for day, share in shares.items() if share >= smallest))
        for smallest in sorted(shares.values())
    }
    best = max(effective, key=effective.__getitem__, default=0)  # of equals the first, that of more days
    found = reviewed_of(
        LoggedLabel(noon(day), f"{i:064x}", "", 0.25, "label" if i < reviewed else None, "1")
        for day, (drawn, reviewed) in days.items()
        for i in range(drawn)
    )
    kept = Counter({day: days[day][1] for day, share in shares.items() if share >= best})
    assert Counter(each.day for each in found) == kept
    assert [each.probability for each in found] == pytest.approx([0.25 * float(shares[each.day]) for each in found])


def test_of_a_log_reviewed_as_a_whole_all_days_count() -> None:
    rare, often = date(2026, 11, 23), date(2026, 11, 24)
    images = [LoggedLabel(noon(rare), f"{i:064x}", "", 0.01, "label", "1") for i in range(5)]
    images += [LoggedLabel(noon(often), f"{i:064x}", "", 0.5, "label", "1") for i in range(100)]
    assert reviewed_of(images) == images


def test_days_of_which_little_is_reviewed_are_told(model: FittedModel, tmp_path: Path) -> None:
    few = sorted((Logged(picture(i), day="2026-11-21") for i in range(20, 60)), key=lambda each: each.sha256)
    images = [Logged(picture(i), "label", "1") for i in range(20)]
    images += [replace(few[0], kind="label", label="2"), *few[1:]]
    sample = read_sample(write_log(tmp_path / "one", images), model)
    assert sample.of_class.first_labels().tolist() == [1] * 20 and sample.weights.tolist() == [10.0] * 20
    assert sample.summary().endswith("; 2026-11-21 is left out, with 1 of 40 images reviewed; label more of them")
    images += [Logged(picture(60), day="2026-11-23")]
    sample = read_sample(write_log(tmp_path / "two", images), model)
    assert sample.summary().endswith(
        "; 2 days from 2026-11-21 to 2026-11-23 are left out, with 1 of 41 images reviewed; label more of them"
    )


def test_a_day_reviewed_in_part_does_not_fall_into_the_quarter_that_chooses() -> None:
    """Its first digests alone are labelled, so in their order it would be 45 of the 50."""
    monday = date(2026, 11, 23)
    found: list[LoggedLabel] = []
    for day, count in ((monday, 1000), (date(2026, 11, 24), 100)):
        digests = sorted(hashlib.sha256(f"{day} {number}".encode()).hexdigest() for number in range(count))
        kinds = ("label" if turn < 100 else None for turn in range(count))
        labelled = zip(digests, kinds, strict=True)
        found += [LoggedLabel(noon(day), sha256, "", 0.1, kind, "1") for sha256, kind in labelled]
    reviewed = sorted(reviewed_of(found), key=lambda image: image.sha256)
    quarter, others = draw_quarter(len(reviewed), seed=4)
    assert sorted([*quarter.tolist(), *others.tolist()]) == list(range(200))
    assert 15 <= sum(reviewed[at].day == monday for at in quarter.tolist()) <= 35


def test_labels_that_do_not_count_are_told(model: FittedModel, tmp_path: Path) -> None:
    images = [Logged(picture(i), "label" if i % 2 else None, "1" if i % 2 else None) for i in range(60)]
    first = sorted(images, key=lambda each: each.sha256)[:20]
    images = [replace(each, kind="label", label="1") if each in first else each for each in images]
    sample = read_sample(write_log(tmp_path, images), model)
    reviewed, labelled = len(sample.of_class), sum(each.kind is not None for each in images)
    assert 20 <= reviewed < labelled
    assert f"{reviewed} of a class ({labelled} have a label; of each day, in the order of" in sample.summary()


def test_labels_of_a_class_that_was_renamed_or_dropped_can_be_used_again(model: FittedModel, tmp_path: Path) -> None:
    labels = ["one"] * 3 + ["upside down"] * 2 + ["1"]
    log = write_log(tmp_path, [Logged(picture(i), "label", label) for i, label in enumerate(labels)])
    with pytest.raises(DataError, match=r"one, upside down; .* psc-log rename"):
        read_sample(log, model)
    for old, new in (("one", "1"), ("upside down", "none_of_the_classes")):
        assert log_cli(["rename", str(tmp_path), old, new]) == 0
    sample = read_sample(log, model)
    assert sample.of_class.first_labels().tolist() == [1] * 4 and len(sample.others["none_of_the_classes"]) == 2
    assert {image.label for image in unknown_of(log, model)} == {"upside down"}  # It keeps its name.
    assert log_cli(["rename", str(tmp_path), "one", "1"]) == 2  # There is none any more.


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
    with pytest.raises(
        DataError, match=r"no classes of the model: cat; .*psc-log rename LOG OLD NEW .none_of_the_classes"
    ):
        read_sample(log, model, "digits")
    with pytest.raises(UsageError, match="rows of several models; it has digits, other, name one by --model"):
        read_sample(log, model)
    with pytest.raises(UsageError, match="no rows of model shoes; it has digits, other"):
        read_sample(log, model, "shoes")
    with pytest.raises(UsageError, match="has no rows; give the folder"):
        read_sample(open_log(tmp_path / "empty"), model)


def test_numbers_of_a_regressions_log(angle_bundle: Path, tmp_path: Path) -> None:
    model = loaded(angle_bundle)
    sample = read_sample(write_log(tmp_path, [Logged(picture(0), "label", "-12.5")]), model)
    assert sample.of_class.values is not None and sample.of_class.values.tolist() == [-12.5]
    assert sample.of_class.target == model.task.number()


def test_reviewed_images_outside_the_sample(model: FittedModel, tmp_path: Path) -> None:
    outside = [Logged(picture(i), "label", str(i), sampled=False) for i in range(5)]
    others = [
        Logged(picture(5), "none_of_the_classes", sampled=False),
        Logged(picture(6), sampled=False),
        Logged(picture(7), "label", "7", sampled=False, stored=False),
        Logged(picture(0), "label", "0"),  # the bytes of an image outside, once more and in the sample
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


@pytest.fixture(scope="module")
def wide_log(tmp_path_factory: pytest.TempPathFactory) -> Log:
    return write_log(tmp_path_factory.mktemp("log"), labelled(opened("mnist"), 260, sampled=160))


@pytest.fixture(scope="module")
def wide(wide_log: Log, model: FittedModel) -> Sample:
    return read_sample(wide_log, model)


@pytest.fixture(scope="module")
def more(wide_log: Log, model: FittedModel) -> ImageDataset:
    return read_outside(wide_log, model)


@torch.inference_mode()
def class_density(model: FittedModel, images: torch.Tensor) -> torch.Tensor:
    """Return log Σ_k π_k N_k of the model's features, from which nothing is subtracted."""
    scorer = model.pipeline.scorer
    density = scorer.density
    w = density.coordinates(scorer.embed(images).density_input)
    distances = density.class_distances(w)
    return (density.get_buffer("constants") - distances.square() / 2).logsumexp(1)


def test_another_camera_is_usual(model: FittedModel, wide: Sample, more: ImageDataset, tmp_path: Path) -> None:
    assert len(more) == 100
    found = recalibrate_from_sample(model, wide, {"risk": 0.9}, more)
    assert found.warnings == () and "100 images outside the sample" in found.lines[1]
    entry = found.model.report["provenance"][HISTORY][-1]
    assert entry["labels"] == 160 and entry["calibrated_on"] == 120 == len(found.model.calibration)
    comparison = entry["extension"]
    assert comparison["images"] == 100 and comparison["times"] in TIMES[1:]
    for before, after in zip(comparison["auroc_before"], comparison["auroc_after"], strict=True):
        assert after >= before - LARGEST_LOSS
    images = next(wide.of_class.batches(160)).images
    before, after = model.compute(images), found.model.compute(images)
    assert float((class_density(found.model, images) - class_density(model, images)).mean()) > 10
    assert (after["log_density"] > before["log_density"]).double().mean() > 0.9
    assert torch.equal(before.probabilities, after.probabilities)
    calibrates = after["ood_score"][draw_quarter(160, seed=4)[1]].sort().values
    torch.testing.assert_close(found.model.calibration.ood_scores, calibrates, rtol=1e-5, atol=1e-4)

    manifest = found.model.save(tmp_path / "bundle")
    again = loaded(tmp_path / "bundle")
    assert torch.equal(again.compute(images).packed, after.packed)
    assert json.loads((tmp_path / "bundle" / "manifest.json").read_text())["provenance"][HISTORY][-1] == entry
    with torch.inference_mode():
        features, _ = again.pipeline.scorer.features(again.pipeline.scorer.standardise(images))
        embedding = again.pipeline.scorer.embedding(features, None)
    reader = SecondReader(tmp_path / "bundle")
    exact = reader.gaussians(reader.tensors("density"), manifest.density.kind, embedding.density_input.double().numpy())
    torch.testing.assert_close(after["log_density"].double(), torch.from_numpy(exact), rtol=1e-4, atol=0.01)
    examples = seen_examples(model)
    assert seen_examples(again) == examples + 100 * comparison["times"]
    assert manifest.checks is not None and manifest.checks.images == 40


def test_a_network_that_is_a_graph(model: FittedModel, wide: Sample, more: ImageDataset, tmp_path: Path) -> None:
    model.save(tmp_path / "graph", graph=True)
    graph = load_model(tmp_path / "graph", device="cpu")
    found = recalibrate_from_sample(graph, wide, {"risk": 0.9}, more).model
    found.save(tmp_path / "extended")
    again, images = load_model(tmp_path / "extended", device="cpu"), next(wide.of_class.batches(64)).images
    assert again.backbone.onnx is not None and (tmp_path / "extended" / "backbone.onnx").is_file()
    assert torch.equal(again.compute(images).packed, found.compute(images).packed)
    assert found.report["provenance"][HISTORY][-1]["extension"]["times"] > 0


def test_of_a_bundle_that_keeps_no_number_the_training_rows_count(model: FittedModel) -> None:
    rows = model.report["provenance"]["train"]["rows"]
    assert seen_examples(model) == rows == model.pipeline.scorer.density.record["examples"]
    scorer = model.pipeline.scorer
    record = {name: value for name, value in scorer.density.record.items() if name != "examples"}
    density = type(scorer.density)(scorer.density.state_dict(), record=record)
    old = replace(model, pipeline=model.pipeline.with_scorer(scorer.replace(density=density)))
    assert seen_examples(old) == rows
    with pytest.raises(UsageError, match="does not say how many examples its density has seen; fit the bundle again"):
        seen_examples(replace(old, report={}))


def test_stored_images_move_with_the_density(model: FittedModel, wide: Sample, more: ImageDataset) -> None:
    scorer, batch = model.pipeline.scorer, next(more.batches(100))
    with torch.inference_mode():
        embedding = scorer.embed(batch.images)
        kept = StoredImages(
            {
                "embedding": scorer.density.coordinates(embedding.density_input).float(),
                "pixels": batch.images,
                "images": torch.arange(100),
                "labels": batch.first_labels(),
            }
        )
        pipeline = Pipeline(scorer, model.pipeline.calibration_scores, model.pipeline.checks, None, kept)
        read = recalibrate._read(scorer, more, recalibrate.Compute(model.device))
        new = extend_pipeline(pipeline, read, 1000, 10)
        assert new.stored_images is not None
        moved = new.scorer.density.coordinates(embedding.density_input).float()
    torch.testing.assert_close(new.stored_images.embedding, moved, rtol=1e-4, atol=1e-4)
    assert new.scorer.texture is not None and scorer.texture is not None
    assert not torch.equal(new.scorer.texture.centres, scorer.texture.centres)


def test_checks_alone(model: FittedModel, wide: Sample, more: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampled images are another camera's, so checks fitted to them are better; the densities are the same here."""
    monkeypatch.setattr(recalibrate, "extend_pipeline", lambda pipeline, *_: pipeline)
    found = recalibrate.extend(model, more, wide.of_class, recalibrate.Compute(model.device))
    assert [*found.aurocs.values()] == [found.aurocs[0]] * len(TIMES)
    assert found.times == 0 and found.pipeline is model.pipeline and "the density stays as it is" in found.warning()


def test_losing_density(model: FittedModel, wide: Sample, more: ImageDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    worse = {0: {"turned": 0.9, "binary": 0.5}, 1: {"turned": 0.87, "binary": 0.99}, 10: {"turned": 0.5, "binary": 1.0}}
    assert recalibrate._choose(worse) == 0
    assert recalibrate._choose({**worse, 1: {"turned": 0.89, "binary": 0.99}}) == 1
    assert recalibrate._choose({0: worse[0], 1: worse[0]}) == 0
    monkeypatch.setattr(recalibrate, "_choose", lambda _: 0)
    found = recalibrate_from_sample(model, wide, {"risk": 0.9}, more)
    assert found.warnings[0].startswith("the density stays as it is: with these 100 images it is no better")
    density = found.model.pipeline.scorer.density
    assert torch.equal(density.get_buffer("centres"), model.pipeline.scorer.density.get_buffer("centres"))
    assert found.model.report["provenance"][HISTORY][-1]["extension"]["times"] == 0
    assert len(found.model.calibration) == 120  # The others have chosen, if only that nothing changes.


def test_refuses_too_few_images(model: FittedModel, wide: Sample, more: ImageDataset, angle_bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"at least 25, and of 80 labelled images of .* classes that are 20 "):
        recalibrate_from_sample(model, wide.at(torch.arange(80)), {}, more)
    angles = loaded(angle_bundle)
    with pytest.raises(
        UsageError, match=r"regression's bundle does not keep where its bins part.*fit the bundle again"
    ):
        seen_examples(angles)


# -- the check reviewed --------------------------------------------------------------------------------------------

UPSIDE_DOWN = ("five", "seven")  # as if pages were scanned the wrong way round


@pytest.fixture(scope="module")
def shipped() -> FittedModel:
    return load_model(ROOT / "artifacts" / "dirty-mnist-resnet18", device="cpu")


@pytest.fixture(scope="module")
def reviewed_log(digits: ImageDataset, tmp_path_factory: pytest.TempPathFactory) -> Log:
    labels = digits.first_labels().tolist()
    images = labelled(digits, 160, plain)
    for name, label in zip(UPSIDE_DOWN, (5, 7), strict=True):
        for count, i in enumerate([i for i in range(160, 800) if labels[i] == label][:16]):
            content = png(np.ascontiguousarray(digits.image(i)[0][::-1, ::-1]))
            of_day = {"day": f"2026-11-{12 + (count % 5 == 0)}", "sampled": count % 3 == 0}
            images.append(Logged(content, "none_of_the_classes", name if count < 12 else None, **of_day))
    return write_log(tmp_path_factory.mktemp("log"), images)


@pytest.fixture(scope="module")
def learnt(shipped: FittedModel, reviewed_log: Log) -> Recalibrated:
    unknown = read_unknown(reviewed_log, shipped)
    return recalibrate_from_sample(shipped, read_sample(reviewed_log, shipped), {}, None, unknown)


def test_unknown_images_of_a_log(shipped: FittedModel, reviewed_log: Log) -> None:
    images, days = read_unknown(reviewed_log, shipped)
    assert images.classes == ("none_of_the_classes", *UPSIDE_DOWN)
    assert images.first_labels().bincount().tolist() == [8, 12, 12] and len(days) == 32
    assert {*days} == {"2026-11-12", "2026-11-13"}
    late, days = read_unknown(reviewed_log, shipped, since="2026-11-13")
    assert len(late) == 8 == days.count("2026-11-13") == len(days)


def test_what_people_reviewed_becomes_a_check(
    shipped: FittedModel, reviewed_log: Log, learnt: Recalibrated, tmp_path: Path
) -> None:
    sample, new = read_sample(reviewed_log, shipped), learnt.model
    assert learnt.warnings == () and "with what 8 none_of_the_classes, 12 five, 12 seven teach" in learnt.lines[1]
    before, after = map(
        float, re.findall(r"held back: ([\d.]+)% without the check, ([\d.]+)% with it", learnt.lines[2])[0]
    )
    assert after > before + 10 and not any("labelled none_of_the_classes" in line for line in learnt.lines)
    assert "the bundle before promised at most 0.01" in learnt.lines[0]
    entry = new.report["provenance"][HISTORY][-1]["reviewed"]
    assert entry["helps"] and [kind["images"] for kind in entry["kinds"]] == [8, 12, 12]
    assert entry["kinds"][1]["day"] == "2026-11-12"
    assert entry["images"][0] == "reviewed, held back" and entry["auroc_after"][0] > entry["auroc_before"][0] + 0.02
    for before, after in zip(entry["auroc_before"][1:], entry["auroc_after"][1:], strict=True):
        assert after >= before - LARGEST_LOSS
    assert new.checks == (*shipped.checks, "reviewed") and len(new.calibration) == 120  # A quarter has chosen.
    images = next(sample.of_class.batches(160)).images
    before, after = shipped.compute(images), new.compute(images)
    for name in ("log_density", "predictive_entropy"):
        torch.testing.assert_close(before[name], after[name])
    assert ((after["ood_score"] - before["ood_score"]) >= -1e-4).all()  # It only ever adds an alarm.
    calibrates = after["ood_score"][draw_quarter(160, seed=4)[1]].sort().values
    torch.testing.assert_close(new.calibration.ood_scores, calibrates, rtol=1e-4, atol=1e-4)
    old, checks = shipped.pipeline.checks, new.pipeline.checks
    assert old is not None and checks is not None and torch.equal(checks.ascending[:-1], old.ascending)

    manifest = new.save(tmp_path / "bundle")
    assert manifest.checks is not None and manifest.checks.reviewed is not None
    assert manifest.checks.reviewed.stored_images is not None and manifest.stored_images is not None
    again = load_model(tmp_path / "bundle", device="cpu")
    assert torch.equal(again.compute(images).packed, after.packed)
    reader = SecondReader(tmp_path / "bundle")
    with torch.inference_mode():
        scorer = again.pipeline.scorer
        features, _ = scorer.features(scorer.standardise(images))
        explanation = again.pipeline.explain(images[:3])[1]
    theirs, rank = reader.answer([part.numpy() for part in features]), 1.01 / (len(again.calibration) + 1)
    assert np.abs(theirs.p_value - after["ood_p_value"].numpy()).max() <= rank
    assert np.abs(theirs.check_p_values - after.check_p_values.numpy()).max() <= rank
    assert explanation["reviewed"].shape == (3, 3) and explanation["reviewed_distance"].shape == (3, 8 + 12 + 12)


def test_what_is_learnt_replaces_what_was(shipped: FittedModel, reviewed_log: Log, learnt: Recalibrated) -> None:
    sample, unknown = read_sample(reviewed_log, shipped), read_unknown(reviewed_log, shipped)
    again = recalibrate_from_sample(learnt.model, sample, {}, None, unknown)
    history, names = again.model.report["provenance"][HISTORY], again.model.checks
    assert history[0]["reviewed"] == history[1]["reviewed"] and names == learnt.model.checks
    images = next(sample.of_class.batches(32)).images
    torch.testing.assert_close(again.model.compute(images).packed, learnt.model.compute(images).packed)
    mislabelled = replace(sample.of_class, classes=("no kind",), labels=torch.zeros(160, dtype=torch.int64))
    kept = recalibrate_from_sample(learnt.model, sample, {}, None, (mislabelled, ()))
    # What is no better replaces nothing, and that is said.
    assert kept.model.pipeline.scorer.reviewed is learnt.model.pipeline.scorer.reviewed
    assert "learnt before, from 8 none_of_the_classes, 12 five, 12 seven, stays" in kept.warnings[0]


def test_only_a_loss_that_chance_does_not_explain_rules_the_check_out(
    shipped: FittedModel, reviewed_log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown, sample = read_unknown(reviewed_log, shipped), read_sample(reviewed_log, shipped)
    monkeypatch.setattr(recalibrate, "auroc_difference", lambda *_: Difference(0.035, 0.016))
    assert recalibrate_from_sample(shipped, sample, {}, None, unknown).warnings == ()
    for loss, error in ((0.035, 0.014), (0.041, 0.1)):  # Chance explains at most another 0.02.
        monkeypatch.setattr(recalibrate, "auroc_difference", lambda *_, of=(loss, error): Difference(*of))
        (said,) = recalibrate_from_sample(shipped, sample, {}, None, unknown).warnings
        lost = rf"not taken: on 40 synthetic OOD images \(turned\) it loses {loss:.4f} .* without --learn all"
        assert re.search(lost, said)


def test_images_of_the_classes_teach_nothing(model: FittedModel, wide: Sample, more: ImageDataset) -> None:
    wrong = replace(more, classes=("none_of_the_classes",), labels=torch.zeros(len(more), dtype=torch.int64))
    found = recalibrate_from_sample(model, wide, {"risk": 0.9}, None, (wrong, ()))
    assert "the check reviewed is not taken: on reviewed images" in found.warnings[0]
    assert "stays" not in found.warnings[0]
    assert found.model.checks == model.checks
    assert not found.model.report["provenance"][HISTORY][-1]["reviewed"]["helps"]
    few = wrong.subset(torch.arange(4))
    with pytest.raises(UsageError, match=r"4 images are reviewed .* needs 10; review 6 more"):
        recalibrate_from_sample(model, wide, {"risk": 0.9}, None, (few, ()))
    alone = replace(model, pipeline=Pipeline(model.pipeline.scorer, model.pipeline.calibration_scores))
    with pytest.raises(UsageError, match="the model has no checks"):
        recalibrate_from_sample(alone, wide, {"risk": 0.9}, None, (wrong, ()))


def test_the_check_moves_with_an_extended_density(learnt: Recalibrated, digits: ImageDataset) -> None:
    pipeline, more = learnt.model.pipeline, digits.subset(torch.arange(700, 760))
    read = recalibrate._read(pipeline.scorer, more, recalibrate.Compute(learnt.model.device))
    moved, images = extend_pipeline(pipeline, read, 85_000, 10), next(more.batches(60)).images
    with torch.inference_mode():
        values = [each.scorer(images).scores["reviewed"] for each in (pipeline, moved)]
    torch.testing.assert_close(*values, rtol=1e-3, atol=1e-3)


def test_an_extension_draws_the_values_of_the_check_again(
    learnt: Recalibrated, digits: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real images, to which p_g of the other checks is fitted, are far fewer."""
    monkeypatch.setattr(recalibrate, "_choose", lambda _: 10)
    model, (more, real) = learnt.model, (digits.subset(torch.arange(at, at + 40)) for at in (700, 740))
    checks = recalibrate.extend(model, more, real, recalibrate.Compute(model.device)).pipeline.checks
    assert checks is not None and len(checks.ascending[-1].unique()) >= 1000 and checks.names == model.checks


def test_in_python(shipped: FittedModel, reviewed_log: Log) -> None:
    (images, _), data = read_unknown(reviewed_log, shipped), read_sample(reviewed_log, shipped).of_class
    pairs = [(batch.images, batch.first_labels()) for batch in images.batches(16)]
    found = shipped.learn(pairs, data)
    assert found.checks[-1] == "reviewed" and len(found.calibration) == 120
    kinds = found.report["provenance"][HISTORY][-1]["reviewed"]["kinds"]
    assert [(kind["name"], kind["images"], kind["day"]) for kind in kinds] == [
        ("none_of_the_classes", 8, None), ("1", 12, None), ("2", 12, None)
    ]  # fmt: skip
    with pytest.raises(UsageError, match=r"a quarter of the 80 images .* give at least 100"):
        shipped.learn(images, data.subset(torch.arange(80)))


def test_a_regression_learns_too(angle_bundle: Path, tmp_path: Path) -> None:
    model = loaded(angle_bundle)
    data = opened("rotated-mnist")
    clothes = opened("fashion-mnist")
    images = labelled(data, 120, plain)
    images += [Logged(plain(clothes, i), "none_of_the_classes", "clothes") for i in range(20)]
    log = write_log(tmp_path, images)
    found = recalibrate_from_sample(model, read_sample(log, model), {}, None, read_unknown(log, model))
    entry = found.model.report["provenance"][HISTORY][-1]["reviewed"]
    assert entry["kinds"] == [{"name": "clothes", "images": 20, "day": "2026-11-20"}]
    assert (found.model.checks[-1] == "reviewed") == entry["helps"]
    found.model.save(tmp_path / "bundle")
    again = loaded(tmp_path / "bundle")
    batch = next(data.batches(16)).images
    assert torch.equal(again.compute(batch).packed, found.model.compute(batch).packed)


@pytest.fixture(scope="module")
def trousers_log(digits: ImageDataset, tmp_path_factory: pytest.TempPathFactory) -> Log:
    """Digits of the random sample, and trousers that people named: 12 of the sample, 30 others."""
    clothes = opened("fashion-mnist")
    trousers = [at for at, label in enumerate(clothes.first_labels().tolist()) if label == 1]
    images = labelled(digits, 160, plain)
    images += [
        Logged(plain(clothes, at), "none_of_the_classes", "trouser", sampled=turn < 12)
        for turn, at in enumerate(trousers[:42])
    ]
    images += [Logged(png(np.full((28, 28), 9 * turn, np.uint8)), "none_of_the_classes") for turn in range(12)]
    return write_log(tmp_path_factory.mktemp("log"), images)


def with_trousers(model: FittedModel, log: Log) -> tuple[FittedModel, Sample, ImageDataset]:
    """The model with their class, and of the log the sample and the trousers outside it."""
    wide = with_class(model, "trouser")
    return wide, read_sample(log, wide), read_named(log, wide)


def of_label(data: ImageDataset, label: int) -> ImageDataset:
    """The first twenty images of a class."""
    return data.subset((data.first_labels() == label).nonzero()[:20, 0])


def test_what_people_named_becomes_a_class(shipped: FittedModel, trousers_log: Log, tmp_path: Path) -> None:
    wide, sample, named = with_trousers(shipped, trousers_log)
    assert len(named) == 30 and sample.of_class.first_labels().bincount()[-1] == 12
    found = recalibrate_from_sample(shipped, sample, {}, named=(wide, named))
    new, entry = found.model, found.model.report["provenance"][HISTORY][-1]["added_class"]
    assert "class trouser from 30 images: held back, " in "".join(found.lines)
    assert entry["recognised"] >= 0.9 and entry["taken"] == 0 and entry["name"] == "trouser"
    assert new.classes == (*shipped.classes, "trouser") and new.network_classes == shipped.classes
    assert len(new.calibration) == 129  # of 172, of which a quarter compares
    images = next(sample.of_class.batches(172)).images
    before, after = shipped.predict(images), new.predict(images)
    trousers = sample.of_class.first_labels().numpy() == 10
    assert (np.array(after.labels)[trousers] == "trouser").mean() >= 0.9
    assert (np.array(after.labels) == np.array(before.labels))[~trousers].all()
    assert (np.array(before.decision)[trousers] == "abstain_ood").all()
    assert (np.array(after.decision)[trousers] == "accept").mean() >= 0.5
    torch.testing.assert_close(after.probabilities.sum(1), torch.ones(172))

    new.save(tmp_path / "bundle")
    again = load_model(tmp_path / "bundle", device="cpu")
    assert torch.equal(again.compute(images).packed, new.compute(images).packed)
    with torch.inference_mode():
        packed, explanation = again.pipeline.explain(images[-20:])
    total = again.outputs(packed)["predictive_entropy"]
    torch.testing.assert_close(explanation["aleatoric"] + explanation["epistemic"], total, rtol=1e-4, atol=1e-5)
    assert (explanation["epistemic"] >= 0).all() and explanation["class_distances"].shape == (20, 11)
    later = recalibrate_from_sample(again, read_sample(trousers_log, again), {}).model  # The old labels name the class.
    assert later.classes == new.classes and len(later.calibration) == 172
    other = PSC.load(tmp_path / "bundle", device="cpu")
    with pytest.raises(UsageError, match="does not know trouser, which was added; leave out --weights"):
        ClassificationEvaluator().open_baselines(other, tmp_path, sample.of_class, sample.of_class)


def test_a_class_that_costs_the_promise_is_named(shipped: FittedModel, trousers_log: Log) -> None:
    """The weights and the preprocessing are those that kept it before."""
    wide, sample, named = with_trousers(shipped, trousers_log)
    labels = sample.of_class.labels.clone()
    labels[:100] = (labels[:100] + 1) % 10
    wrong = replace(sample, of_class=replace(sample.of_class, labels=labels))
    found = recalibrate_from_sample(shipped, wrong, {}, named=(wide, named))
    assert found.model.policy.risk is None and "check the weights" not in found.lines[0]
    assert re.search(r"NOTHING IS ACCEPTED.*of the class trouser, held back, .*% are recognised: give", found.lines[0])
    assert found.lines[0].endswith(f"the bundle before promised at most {shipped.policy.largest_error_rate():.3g}")


def test_what_was_learnt_is_learnt_again(
    learnt: Recalibrated, shipped: FittedModel, trousers_log: Log, reviewed_log: Log
) -> None:
    wide, sample, images = with_trousers(learnt.model, trousers_log)
    unknown, named = read_unknown(reviewed_log, wide), (wide, images)
    alone = recalibrate_from_sample(learnt.model, sample, {}, named=named)
    assert alone.model.checks == shipped.checks and any("learn it again" in line for line in alone.lines)
    both = recalibrate_from_sample(learnt.model, sample, {}, None, unknown, named)
    assert both.model.checks[-1] == "reviewed" and not any("learn it again" in line for line in both.lines)
    of_class, _ = read_unknown(trousers_log, wide)
    assert of_class.classes == ("none_of_the_classes",) and len(of_class) == 12  # The trousers are of a class now.


def test_a_class_of_original_predictions(original: FittedModel, trousers_log: Log) -> None:
    wide, sample, named = with_trousers(original, trousers_log)
    new = recalibrate_from_sample(original, sample, {"risk": 0.7}, named=(wide, named)).model
    images = next(sample.of_class.batches(160)).images
    before, after = (each.compute(images).probabilities for each in (original, new))
    assert after.shape == (160, 11) and new.predictions == "original"
    kept = after[:, :10] / after[:, :10].sum(1, keepdim=True)
    cooler = (before.log() * float(original.pipeline.scorer.head.temperature)).softmax(1)  # logits up to a constant
    again = (kept.clamp(min=1e-30).log() * float(new.pipeline.scorer.head.temperature)).softmax(1)
    torch.testing.assert_close(again, cooler, rtol=1e-2, atol=1e-3)


def test_names_and_images_that_make_no_class(
    shipped: FittedModel, trousers_log: Log, angle_bundle: Path, digits: ImageDataset
) -> None:
    for name, why in (("7", "one of the classes of the network"), ("", "1 to 200"), ("a:b", "without ':'")):
        with pytest.raises(UsageError, match=why):
            with_class(shipped, name)
    with pytest.raises(UsageError, match="1 to 200"):
        with_class(shipped, "cannot_tell")
    regression = loaded(angle_bundle)
    with pytest.raises(UsageError, match="a regression has no classes"):
        with_class(regression, "trouser")
    with pytest.raises(UsageError, match=r"cluster 3 is a number that .* gave, and no name"):
        read_named(trousers_log, with_class(shipped, "cluster 3"))
    wide = with_class(shipped, "drone")
    with pytest.raises(UsageError, match=r"outside the random sample drone; .*a name that they gave: trouser \(30\)"):
        read_named(trousers_log, wide)
    other, sample, trousers = with_trousers(shipped, trousers_log)
    labels = sample.of_class.first_labels()
    few = sample.at(torch.cat([(labels < 10).nonzero()[:80, 0], (labels == 10).nonzero()[:, 0]]))
    with pytest.raises(UsageError, match="of 80 labelled images of the bundle's classes"):  # not of 92
        recalibrate_from_sample(shipped, few, {}, named=(other, trousers))
    none = wide, trousers.subset(torch.arange(4))
    with pytest.raises(UsageError, match="there are 4 images of drone, and a class needs 10; label 6 more"):
        recalibrate_from_sample(shipped, read_sample(trousers_log, wide), {}, named=none)


@pytest.mark.parametrize("first", [160, 200, 240, 280])
def test_a_class_that_would_answer_nothing_is_refused(shipped: FittedModel, digits: ImageDataset, first: int) -> None:
    of_classes, data = digits.subset(torch.arange(first, first + 40)), digits.subset(torch.arange(160))
    with pytest.raises(UsageError, match="do not tell the 40 images of thing from those of the classes"):
        shipped.add_class("thing", of_classes, data)


def test_names_inside_the_sample_alone_are_told_how_to_leave_it(
    shipped: FittedModel, digits: ImageDataset, tmp_path: Path
) -> None:
    drones = (Logged(plain(digits, at), "none_of_the_classes", "drone") for at in (30, 31))
    inside = [*labelled(digits, 20, plain), *drones]
    log = write_log(tmp_path, inside)
    with pytest.raises(UsageError, match=r"2 images of .* are named drone, all of the random .* lower --log-sample"):
        read_named(log, with_class(shipped, "drone"))
    with pytest.raises(UsageError, match=r"all logged images of digits in .* random sample, .* lower --log-sample"):
        read_outside(log, shipped)


def test_a_class_in_python(shipped: FittedModel, digits: ImageDataset) -> None:
    clothes = opened("fashion-mnist")
    trousers = of_label(clothes, 1)
    data = digits.subset(torch.arange(160))
    found = shipped.add_class("trouser", trousers, data)
    assert found.classes[-1] == "trouser" and len(found.calibration) == 120
    pairs = [(batch.images, batch.first_labels()) for batch in data.batches(64)]
    again = shipped.add_class(
        "trouser", [(next(trousers.batches(20)).images, torch.zeros(20, dtype=torch.int64))], pairs
    )
    images = next(trousers.batches(20)).images
    torch.testing.assert_close(again.compute(images).packed, found.compute(images).packed)
    bags = of_label(clothes, 8)
    both = found.add_class("bag", bags, data)  # which has no trousers
    assert len(found.calibrate(data).calibration) == 160
    assert both.classes[-2:] == ("trouser", "bag") and len(both.pipeline.scorer.added) == 2
    answers = both.predict(next(bags.batches(20)).images).labels, both.predict(images).labels
    assert answers[0].count("bag") >= 15 and answers[1].count("trouser") >= 15
    with pytest.raises(UsageError, match=r"trouser was added already; .* to the bundle from before it"):
        found.add_class("trouser", trousers, data)
    with pytest.raises(UsageError, match=r"extend the bundle from before the first of them, then add each again"):
        recalibrate.extend(found, data, data, recalibrate.Compute(found.device))
    with pytest.raises(UsageError, match=r"a quarter of the 80 images .* give at least 100"):
        shipped.add_class("bag", bags, digits.subset(torch.arange(80)))
    with pytest.raises(DataError, match="expected the model's 11 classes"):
        shipped.add_class("bag", bags, clothes)


@pytest.mark.parametrize("others", [0, 40])
def test_a_quarter_with_few_images_of_the_classes_before_adds_no_class(
    shipped: FittedModel, digits: ImageDataset, others: int
) -> None:
    clothes = opened("fashion-mnist")
    trousers = next(clothes.subset(torch.arange(120)).batches(120)).images  # as if all were; nothing looks at them
    pairs = [(trousers, torch.full((120,), 10))]
    if others:
        batch = next(digits.subset(torch.arange(others)).batches(others))
        pairs.append((batch.images, batch.first_labels()))
    with pytest.raises(UsageError, match=r"at least 25 of them must be of these, not \d+; give more than 100 images"):
        shipped.add_class("trouser", clothes.subset(torch.arange(20)), pairs)


def test_a_class_takes_nothing_where_no_answer_is_right(shipped: FittedModel, digits: ImageDataset) -> None:
    clothes = opened("fashion-mnist")
    trousers = of_label(clothes, 1)
    data = digits.subset(torch.arange(40))
    packed = dataset_outputs(shipped, data, "").packed
    answered = torch.from_numpy(shipped.decide(shipped.outputs(packed.numpy())).class_index)
    wrong = replace(data, labels=(answered + 1) % 10)
    added = recalibrate.add_class(shipped, "trouser", trousers, wrong, recalibrate.Compute(shipped.device))
    assert added.taken == 0.0 == added.compared and added.recognised > 0.5
    assert "it takes 0 of 0 right answers" in added.text(learns=False)
