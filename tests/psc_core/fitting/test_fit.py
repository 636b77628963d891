from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from psc_core import PSC, FitSettings, fit_projection, fit_psc, load_network, measure_collapse, open_loader
from psc_core import fit as stages
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, concatenate, draw_balanced
from psc_core.errors import FitError, LoaderWarning, NetworkError, UsageError
from psc_core.fit import trial_of
from psc_core.fit_data import FitData, FitJob, check_settings
from psc_core.model import TRIAL_IMAGES
from psc_core.projection import FittedProjection
from psc_core.settings import Stage, settings_where
from tests import tiny
from tests.conftest import TinyJob
from tests.opened import opened

SETTINGS = FitSettings(device="cpu")


def test_fit_that_cannot_be_probed_is_an_error_of_the_fit(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psc_core.model.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(FitError, match="same features"):
        fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)


def test_sizes_without_validation_images(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    chosen = measure_collapse(net, train, val, layers="^4$", settings=SETTINGS).choose()
    fitted = fit_projection(net, chosen, train, settings=SETTINGS)
    assert fitted.projection.c_proj * fitted.projection.d_proj >= 64
    assert fitted.report.of_size()[1] >= fitted.report.scaled_nc4 - 0.01
    few = fit_projection(net, chosen, train, max_images=60, settings=SETTINGS).report
    assert torch.equal(few.nc1, fit_projection(net, chosen, draw_balanced(train, 60), settings=SETTINGS).report.nc1)


def test_a_loss_of_nc4_is_said_where_z_alone_is_read(net: nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    def warning(**changes: Any) -> str:
        settings = SETTINGS.changed(dict(c_proj=1, d_proj=1, **changes))
        return fit_projection(net, ChosenLayer(("4",), ""), train, val, settings=settings).report.warning

    assert warning() == ""
    assert "of NC4" in warning(head_input="z")
    assert "of NC4" in warning(density="gda")


def test_validation_images_that_were_trained_on_are_refused(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    more = concatenate("both", [val, train.subset(torch.arange(20))])
    for data, count in ((train, len(train)), (more, 20)):
        for stage in (
            partial(measure_collapse, net),
            partial(fit_projection, net, ChosenLayer(("4",), "")),
            partial(fit_psc, net, ChosenLayer(("4",), ""), projection),
        ):
            with pytest.raises(UsageError, match=f"{count} of the {len(data)} "):
                stage(train, data, settings=SETTINGS)
    with pytest.warns(LoaderWarning, match="validation images are repeated"):
        twice = [(batch.images, batch.labels) for batch in val.batches(64)] * 2
        repeated = open_loader(twice, preprocess=val.preprocess, classes=val.classes)
        fit_psc(net, ChosenLayer(("4",), ""), projection, train, repeated, head="duq", settings=SETTINGS)


def test_a_network_that_reads_the_whole_batch_is_refused_before_the_images(
    projection: FittedProjection, train: ImageDataset, val: ImageDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In every stage, because each may be called alone."""

    def unread(*_: Any, **__: Any) -> None:
        pytest.fail("images were read")

    monkeypatch.setattr(ImageDataset, "batches", unread)
    monkeypatch.setattr(ImageDataset, "image", unread)
    bad = tiny.network().eval().append(torch.nn.Softmax(0))
    chosen = ChosenLayer(("4",), "")
    for stage in (
        lambda: measure_collapse(bad, train, val, settings=SETTINGS),
        lambda: fit_projection(bad, chosen, train, settings=SETTINGS),
        lambda: fit_psc(bad, chosen, projection, train, val, settings=SETTINGS),
    ):
        with pytest.raises(NetworkError, match="the other images of the batch"):
            stage()


@pytest.fixture(scope="module")
def data(train: ImageDataset, val: ImageDataset) -> FitData:
    return FitData.of(train, val)


def test_a_model_is_tried_with_the_first_calibration_images(data: FitData) -> None:
    images = trial_of(data.calibration)
    assert len(images) == min(TRIAL_IMAGES, len(data.calibration))
    assert torch.equal(images[:8], next(data.calibration.batches(8)).images)


def recording(settings: FitSettings, read: set[str]) -> FitSettings:
    """Return the same settings, whose names are added to ``read`` as they are read."""

    class Recording(FitSettings):
        def __getattribute__(self, name: str) -> object:
            read.add(name)
            return super().__getattribute__(name)

    same = Recording(**dict(settings))
    read.clear()  # The constructor checks them all.
    return same


@pytest.mark.parametrize(("job", "images"), [("tiny_job", "mnist"), ("angle_job", "rotated-mnist")])
def test_stages_read_their_settings(job: str, images: str, request: pytest.FixtureRequest) -> None:
    trained: TinyJob = request.getfixturevalue(job)
    data = FitData.of(opened(images, "train"), opened(images, "val"))
    settings = check_settings(FitSettings(device="cpu", minimum_dim=8), data)
    read: dict[Stage, set[str]] = {stage: set() for stage in Stage}
    jobs = {stage: FitJob(data, recording(settings, read[stage]), settings.compute()) for stage in Stage}
    chosen = stages.collapse(trained.net, jobs[Stage.COLLAPSE]).choose()
    projection = stages.project(trained.net, chosen, jobs[Stage.PROJECTION])
    stages.fit_model(trained.net, chosen, projection, jobs[Stage.LAST])
    for stage in Stage:
        by_others = set().union(*(read[other] for other in Stage if other != stage))
        declared = {*filter(data.task_type.reads, settings_where(stage=stage))}
        assert read[stage] & {*settings_where()} - by_others == declared, stage


FACTORY = "tests.tiny:network"


@pytest.mark.parametrize(
    ("layers", "budget", "positions", "reduced"),
    [
        (("2", "4"), 1 << 30, (49, 16), False),  # two maps of 16 channels, concatenated along positions
        (("4", "6"), 1 << 30, (16, 1), False),  # a map and its average, which is one more position
        (("7",), 1 << 30, (16,), False),  # a vector: one channel of 16 positions
        (("2",), 16 * 16**2 * 8, (9,), True),  # a map whose covariance does not fit its budget
    ],
    ids=["two layers", "map and vector", "vector", "pooled"],
)
def test_every_kind_of_layer(
    tiny_job: TinyJob, tmp_path: Path, layers: tuple[str, ...], budget: int, positions: tuple[int, ...], reduced: bool
) -> None:
    weights = tiny_job.weights
    net = load_network(FACTORY, weights=weights, num_classes=10)
    train, val, shirts = (
        opened(name, split) for name, split in (("mnist", "train"), ("mnist", "val"), ("fashion-mnist", "test"))
    )
    settings = FitSettings(device="cpu", max_memory=budget)
    chosen = ChosenLayer(layers, "named by the test")
    projection = fit_projection(net, chosen, train, val, minimum_dim=8, settings=settings)
    assert tuple(projection.projection.positions) == positions
    assert bool(projection.report.note) == reduced
    psc = fit_psc(net, chosen, projection, train, val, settings=settings)
    psc.save(tmp_path / "bundle")
    again = PSC.load(tmp_path / "bundle", device="cpu", allow_factories=(FACTORY,))
    digits = next(iter(val.batches(100))).images
    fitted, stored = psc.predict(digits), again.predict(digits)
    torch.testing.assert_close(stored.probabilities, fitted.probabilities, atol=1e-5, rtol=0)
    torch.testing.assert_close(stored.log_density, fitted.log_density, atol=1e-3, rtol=1e-5)
    doubted = again.predict(next(iter(shirts.batches(100))).images).is_ood.double().mean()
    assert float(doubted) > float(stored.is_ood.double().mean())
    assert again.layers == layers


CHOSEN = ChosenLayer(("4",), "")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"head": "blr"}, "head"),
        ({"density": "kde"}, "density"),
        ({"ood_score": "energy"}, "ood_score"),
        ({"predictions": "both"}, "predictions"),
        ({"head_input": "x"}, "head_input"),
        ({"alpha": 1e-9}, "alpha"),
        ({"coverage": 0.9999}, "coverage"),
        ({"stored_images": 9}, "expected stored_images from 10, .* to 4096, got 9"),
        ({"stored_images": 5000}, "stored_images"),
        ({"predictions": "original", "head": "duq"}, "no head beside predictions 'original'"),
        ({"predictions": "original", "head_input": "z"}, "no head_input beside predictions 'original'"),
    ],
)
def test_what_cannot_be_kept_is_refused_before_any_image_is_read(
    net: nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
    wrong: dict[str, Any],
    words: str,
) -> None:
    monkeypatch.setattr("psc_core.fit_parts.cut", None)
    with pytest.raises(UsageError, match=words):
        fit_psc(net, CHOSEN, projection, train, val, settings=SETTINGS, **wrong)


def test_what_belongs_to_another_stage_is_refused(
    net: nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    named = measure_collapse(net, train, val, layers="^4$", device="cpu", seed=3, epsilon=0.1)
    assert (named.seed, named.epsilon, named.pattern) == (3, 0.1, "^4$")
    collapse = partial(measure_collapse, net, train, val)
    project = partial(fit_projection, net, CHOSEN, train, val)
    last = partial(fit_psc, net, CHOSEN, projection, train, val)
    for use, said in (
        *((partial(stage, layer="4"), "expected no layer") for stage in (collapse, project, last)),
        (partial(collapse, alpha=0.1), "measure_collapse does not read alpha, fit_psc or fit_regressor does"),
        (partial(project, granularity="blocks"), "does not read granularity, measure_collapse does"),
        (partial(project, density="pca"), "density to be one of gda"),
        (partial(last, c_proj=4, d_proj=2), "does not read c_proj, d_proj, fit_projection does"),
        (partial(fit_projection, net, named.choose(), train, val, seed=0), "expected seed=3"),
        (partial(fit_psc, net, ChosenLayer(("2",), ""), projection, train, val), "a projection of 2, got one of 4"),
    ):
        with pytest.raises(UsageError, match=said):
            use()
