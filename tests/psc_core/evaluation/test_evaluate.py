"""One entrance for the models of all tasks, and observed rates beside nominal ones."""

from pathlib import Path

import pytest
import torch

from psc_core import open_dataset
from psc_core.data.open import image_folder
from psc_core.evaluation.evaluate import ObservedRate, describe_rate, evaluate, observed_rate, repeated_warning
from psc_core.metrics import CountInterval, RateInterval
from tests.opened import loaded
from tests.psc_core.data.support import TINY, write_folder


@pytest.mark.parametrize(("bundle", "data"), [("tiny_bundle", "dirty-mnist"), ("angle_bundle", "rotated-mnist")])
def test_a_model_of_any_task_is_measured(
    bundle: str, data: str, data_root: Path, request: pytest.FixtureRequest
) -> None:
    model = loaded(request.getfixturevalue(bundle))
    known, shirts = (
        open_dataset(f"{name}:{data_root}", split="test", preprocess=model.preprocess).subset(torch.arange(40))
        for name in (data, "fashion-mnist")
    )
    found = evaluate(model, known, {"shirts": shirts}, batch_images=17)
    assert (found.report.id_name, found.report.images) == (known.name, 40)
    assert found.report.model["version"] == model.version and set(found.outside) == {"shirts"}
    prediction = model.predict(next(shirts.batches(40)).images)
    written = found.report.to_json()
    assert written["flagged"]["shirts"] == pytest.approx(float(prediction.is_ood.double().mean()))
    assert written["summary"] == found.report.summary()
    for name in ("false_alarms", "misses"):
        rate: ObservedRate = getattr(found.report, name)
        assert (written[name]["rate"], written[name]["assessment"]) == (rate.rate, rate.assessment)


@pytest.mark.parametrize(
    ("count", "assessment"),
    [(19, "lower than stated"), (20, "as stated"), (80, "as stated"), (81, "higher than stated")],
)
def test_assessment_at_the_edges(count: int, assessment: str) -> None:
    interval, counted, expected = RateInterval(0.03, 0.07), CountInterval(33, 69), CountInterval(20, 80)
    assert ObservedRate(0.05, count, 1000, 199, 0.99, interval, counted, expected).assessment == assessment


@pytest.mark.parametrize(
    ("count", "images", "calibrated_on", "assessment"),
    [
        (1, 3, 4000, "not shown"),
        (0, 30, 4000, "not shown"),
        (200, 1000, 19, "not shown"),  # Of so few calibration images, many times the nominal rate can be chance.
        (0, 60, 4000, "as stated"),
        (15, 300, 4000, "as stated"),
        (915, 16000, 4000, "as stated"),
    ],
)
def test_a_rate_is_as_stated_where_the_images_show_it(
    count: int, images: int, calibrated_on: int, assessment: str
) -> None:
    rate = observed_rate(torch.arange(images) < count, 0.05, calibrated_on)
    assert rate.assessment == assessment
    assert ("Not enough images to tell" in describe_rate("Alarms", rate)) == (assessment == "not shown")


def test_images_that_repeat_are_warned_of(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", {"a": 60})
    assert repeated_warning(image_folder(images, TINY)) == ""
    (images / "a" / "copy.png").write_bytes((images / "a" / "0.png").read_bytes())
    (images / "a" / "link.png").symlink_to("1.png")
    assert f"2 of the 62 images of {images} are repeated" in repeated_warning(image_folder(images, TINY))
    rows = [f"a/{number}.png,a" for number in range(60)] * 2
    table = images / "twice.csv"
    table.write_text("\n".join(["file,label", *rows]))
    assert "60 of the 120 images" in repeated_warning(open_dataset(table, split="test", preprocess=TINY))


def test_observed_rates_follow_the_beta_binomial() -> None:
    happened = torch.zeros(1000, dtype=torch.bool)
    assert observed_rate(happened, 0.05, 199).assessment == "lower than stated"
    happened[:75] = True
    noisy, sharp = observed_rate(happened, 0.05, 199), observed_rate(happened, 0.05, 99_999)
    assert noisy.assessment == "as stated" and noisy.acceptance.high < 75
    assert sharp.assessment == "higher than stated"
