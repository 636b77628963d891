"""The four calls of the paper's pseudo-code: results, and clear errors before anything is fitted."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from psc_core import FitSettings, fit_projection, fit_psc, fit_regressor, measure_collapse, open_loader
from psc_core.collapse import ChosenLayer
from psc_core.data.dataset import ImageDataset, balanced, concatenate
from psc_core.errors import FitError, LoaderWarning, NetworkError, UsageError
from psc_core.projection import FittedProjection
from tests import tiny

SETTINGS = FitSettings(device="cpu")


def test_unknown_options(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    chosen = measure_collapse(net, train, val, layers="^4$", settings=SETTINGS).choose()
    with pytest.raises(UsageError, match="expected density to be one of gda"):
        fit_projection(net, chosen, train, density="pca", settings=SETTINGS)


def test_fit_that_cannot_be_probed_is_an_error_of_the_fit(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psc_core.model.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(FitError, match="same features"):
        fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, head="duq", settings=SETTINGS)


def test_sizes_without_validation_images(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    chosen = measure_collapse(net, train, val, layers="^4$", settings=SETTINGS).choose()
    fitted = fit_projection(net, chosen, train, settings=SETTINGS)
    assert fitted.projection.c_proj * fitted.projection.d_proj >= 64
    assert fitted.report.of_size()[1] >= fitted.report.scaled_nc4 - 0.01
    few = fit_projection(net, chosen, train, max_images=60, settings=SETTINGS).report
    assert torch.equal(few.nc1, fit_projection(net, chosen, balanced(train, 60), settings=SETTINGS).report.nc1)


def test_a_loss_of_nc4_is_said_where_z_is_all_that_is_read(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    def warning(**changes: Any) -> str:
        settings = SETTINGS.changed(dict(c_proj=1, d_proj=1, **changes))
        return fit_projection(net, ChosenLayer(("4",), ""), train, val, settings=settings).report.warning

    assert warning() == ""
    assert "of NC4" in warning(head_input="z")
    assert "of NC4" in warning(density="gda")


def test_settings_are_given_by_name(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    named = measure_collapse(net, train, val, layers="^4$", device="cpu", seed=3, epsilon=0.1)
    assert (named.seed, named.epsilon, named.pattern) == (3, 0.1, "^4$")
    with pytest.raises(UsageError, match="expected seed=3"):
        fit_projection(net, named.choose(), train, val, seed=0)


def test_validation_images_that_were_trained_on_are_refused(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
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
        loaded = open_loader(twice, preprocess=val.preprocess, classes=val.classes)
        fit_psc(net, ChosenLayer(("4",), ""), projection, train, loaded, head="duq", settings=SETTINGS)


def test_a_layer_is_the_candidates(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    for use in (
        lambda: measure_collapse(net, train, val, layer="4"),
        lambda: fit_projection(net, ChosenLayer(("4",), ""), train, val, layer="4"),
        lambda: fit_psc(net, ChosenLayer(("4",), ""), projection, train, val, layer="4"),
    ):
        with pytest.raises(UsageError, match=r"expected no layer: .* report\.chosen\(layer\)"):
            use()


def test_settings_of_another_stage_are_refused(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    with pytest.raises(UsageError, match="measure_collapse does not read alpha, fit_psc or fit_regressor does"):
        measure_collapse(net, train, val, alpha=0.1)
    with pytest.raises(UsageError, match="fit_projection does not read granularity, measure_collapse does"):
        fit_projection(net, ChosenLayer(("4",), ""), train, val, granularity="blocks")
    for fit in (fit_psc, fit_regressor):
        with pytest.raises(UsageError, match="does not read c_proj, d_proj, fit_projection does; leave out or give it"):
            fit(net, ChosenLayer(("4",), ""), projection, train, val, c_proj=4, d_proj=2)


def test_projection_of_another_layer_is_refused(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    with pytest.raises(UsageError, match=r"expected a projection of the chosen layer 2, got one of 4"):
        fit_psc(net, ChosenLayer(("2",), ""), projection, train, val, settings=SETTINGS)


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
