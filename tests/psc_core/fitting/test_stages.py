"""The four calls of the paper's pseudo-code refuse what cannot give a bundle that works, in one clear sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from psc_core import FitOptions, fit_projection, fit_psc, load_network, measure_collapse, open_dataset
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset, split_validation
from psc_core.errors import DataError, FitError, UsageError
from psc_core.fitting.calibrate import OOD_SCORES, entropy_weight
from psc_core.fitting.stages import FittedProjection
from psc_core.heads.fit import sngp, softmax
from psc_core.images.preprocess import PRESETS
from psc_core.projection.fit.ranks import choose_ranks
from tests.conftest import TinyJob

FACTORY = "tests.tiny:network"
OPTIONS = FitOptions(device="cpu")


@pytest.fixture(scope="module")
def net(tiny_job: TinyJob) -> torch.nn.Module:
    weights = tiny_job.args[tiny_job.args.index("--weights") + 1]
    return load_network(FACTORY, weights=weights, num_classes=10, allow_factories=(FACTORY,))


@pytest.fixture(scope="module")
def train(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="train", preprocess=PRESETS["mnist"])


@pytest.fixture(scope="module")
def val(data_root: Path) -> ImageDataset:
    return open_dataset(f"mnist:{data_root}", split="val", preprocess=PRESETS["mnist"])


@pytest.fixture(scope="module")
def projection(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> FittedProjection:
    candidate = measure_collapse(net, train, val, options=OPTIONS).candidate("4")
    return fit_projection(net, candidate, train, val, options=OPTIONS)


def test_rates_that_few_images_cannot_promise(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate("4")
    for rates, message in (({"alpha": 1e-4}, "alpha"), ({"coverage": 0.9999}, "coverage")):
        with pytest.raises(UsageError, match=message):
            fit_psc(net, candidate, projection, train, val, head="duq", options=OPTIONS, **rates)
    with pytest.raises(UsageError, match="'psc' or 'base'"):
        fit_psc(net, candidate, projection, train, val, predictions="both", options=OPTIONS)
    with pytest.raises(UsageError, match="ood_score to be one of density, density"):
        fit_psc(net, candidate, projection, train, val, ood_score="entropy", options=OPTIONS)
    with pytest.raises(FitError, match="pca"):
        fit_psc(net, candidate, projection, train, val, pca=999, options=OPTIONS)


def test_the_entropy_counts_as_much_as_the_density(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate("4")
    plain, both = (
        fit_psc(net, candidate, projection, train, val, head="duq", ood_score=score, options=OPTIONS)
        for score in OOD_SCORES
    )
    choose, calibrate = split_validation(val, OPTIONS.seed)
    alone = plain.predict(next(choose.batches(len(choose))).images)
    weight = both.pipeline.entropy_weight
    assert plain.pipeline.entropy_weight == 0.0
    assert weight == pytest.approx(
        np.std(alone.log_density.double().numpy(), ddof=1) / np.std(alone.predictive_entropy.double().numpy(), ddof=1)
    )
    images = next(calibrate.batches(len(calibrate))).images
    alone, told = plain.predict(images), both.predict(images)
    assert torch.equal(alone.ood_score, -alone.log_density)
    torch.testing.assert_close(told.log_density, alone.log_density)
    torch.testing.assert_close(told.ood_score, weight * told.predictive_entropy - told.log_density)
    torch.testing.assert_close(both.calibration.scores, told.ood_score.sort().values)
    n = len(images)  # of n calibration images themselves, the k-th strangest has the p-value (k + 1) / (n + 1)
    assert sorted((told.ood_p_value * (n + 1)).round().int().tolist()) == list(range(2, n + 2))


def test_the_calibrating_half_chooses_nothing(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    calibrates = torch.isin(val.indices, split_validation(val, OPTIONS.seed)[1].indices)
    other = replace(val, labels=torch.where(calibrates, (val.labels + 1) % 10, val.labels))
    collapse, other_collapse = (
        measure_collapse(net, train, data, layers="^4$", options=OPTIONS) for data in (val, other)
    )
    assert collapse == other_collapse
    candidate = collapse.candidate("4")
    assert fit_projection(net, candidate, train, other, options=OPTIONS).report.choice == projection.report.choice
    one, two = (
        fit_psc(net, candidate, projection, train, data, head="duq", options=OPTIONS).pipeline for data in (val, other)
    )
    assert one.scorer.head is not None and two.scorer.head is not None
    assert one.scorer.head.record == two.scorer.head.record
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, two.state_dict()[name]), name


def test_the_seed_reaches_the_head(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 8)
    monkeypatch.setattr(softmax, "PRECISIONS", (1.0,))
    candidate = Candidate(("4",), "")
    one, two = (
        fit_psc(
            net, candidate, projection, train, val, head="sngp", options=replace(OPTIONS, seed=seed)
        ).pipeline.state_dict()
        for seed in (0, 1)
    )
    assert not torch.equal(
        one["scorer.head.phases"], two["scorer.head.phases"]
    )  # The length-scale moves the frequencies alone.


def test_the_risk_reaches_the_ambiguity_threshold(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psc_core.fitting.calibrate.ambiguity_threshold", lambda *_, risk: risk)
    psc = fit_psc(net, Candidate(("4",), ""), projection, train, val, head="duq", risk=0.3, options=OPTIONS)
    assert psc.policy.ambiguity_threshold == 0.3


def test_an_entropy_that_never_varies_does_not_count() -> None:
    log_density = torch.arange(5.0)
    assert entropy_weight({"log_density": log_density, "predictive_entropy": torch.full((5,), 0.3)}) == 0.0
    weight = entropy_weight({"log_density": log_density, "predictive_entropy": log_density / 4})
    assert weight == pytest.approx(4.0)


def test_classes_must_be_the_same_and_at_least_two(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    with pytest.raises(DataError, match="the same class folders"):
        measure_collapse(net, train, replace(val, classes=(*val.classes[:-1], "x")), options=OPTIONS)
    alone = [replace(data, classes=("all",), labels=torch.zeros_like(data.labels)) for data in (train, val)]
    with pytest.raises(DataError, match="at least two classes"):
        measure_collapse(net, *alone, options=OPTIONS)


def test_a_class_of_a_single_image_is_refused_before_anything_is_fitted(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    labels = train.labels.clone()
    labels[labels == 3] = 4
    labels[0] = 3
    with pytest.raises(DataError, match="two training images of each class, got 1 of '3'"):
        measure_collapse(net, replace(train, labels=labels), val, options=OPTIONS)


def test_base_predictions_want_an_output_for_each_class(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    wide = torch.nn.Sequential(*list(net)[:-1], torch.nn.Linear(16, 20)).eval()  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="10 outputs to serve its own, got 20"):
        fit_psc(wide, Candidate(("4",), ""), projection, train, val, predictions="base", options=OPTIONS)


def test_unknown_options(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    with pytest.raises(UsageError, match="'tucker'"):
        fit_projection(net, candidate, train, method="pca", options=OPTIONS)
    with pytest.raises(UsageError, match="precision"):
        fit_projection(net, candidate, train, options=FitOptions(device="cpu", precision="fp8"))


def test_without_validation_images_the_training_images_choose_sizes(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    fitted = fit_projection(net, candidate, train, options=OPTIONS)
    assert fitted.projection.c_proj * fitted.projection.d_proj >= 64
    assert fitted.report.choice.nc4 >= fitted.report.scaled_nc4 - 0.01


def test_a_minimum_beyond_the_layer_means_all_of_it() -> None:
    flat = torch.full((1, 16), 0.9)
    choice = choose_ranks(flat, flat, epsilon=0.2, reference_nc4=0.9, minimum=64)
    assert (choice.c_proj, choice.d_proj) == (1, 16)
