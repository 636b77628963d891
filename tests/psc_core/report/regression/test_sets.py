"""What a regression's report keeps of images."""

from __future__ import annotations

from pathlib import Path

from psc_core import PSCRegressor, open_dataset
from psc_core.evaluation.regression import RegressionEvaluator
from psc_core.report import regression
from psc_core.report.content import Role


def test_numbers_of_out_of_distribution_images_are_no_truth(angle_bundle: Path, data_root: Path) -> None:
    model = PSCRegressor.load(angle_bundle, device="cpu", allow_factories=["tests.tiny:network"])
    data = open_dataset(f"rotated-mnist:{data_root}", split="val", preprocess=model.preprocess)
    scored = RegressionEvaluator().score_images(model, data)
    assert len(regression.RegressionTaskReport().scored_set("test", Role.TEST, data, scored).values) == len(data)
    outside = regression.RegressionTaskReport().scored_set("others", Role.OOD, data, scored)
    assert len(outside.values) == 0 and outside.quality == {}
    assert regression.RegressionTaskReport().pictures_of(data, scored) == ()
