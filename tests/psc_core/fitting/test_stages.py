"""The four calls of the paper's pseudo-code: results, and clear errors before anything is fitted."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitOptions, fit_projection, fit_psc, measure_collapse
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError, UsageError
from psc_core.fitting.parts import FittedProjection

FACTORY = "tests.tiny:network"
OPTIONS = FitOptions(device="cpu")


def test_unknown_options(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    with pytest.raises(UsageError, match="'tucker'"):
        fit_projection(net, candidate, train, method="pca", options=OPTIONS)


def test_fit_that_cannot_be_probed_is_an_error_of_the_fit(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("psc_core.model.base.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(FitError, match="same features"):
        fit_psc(net, Candidate(("4",), ""), projection, train, val, head="duq", options=OPTIONS)


def test_sizes_without_validation_images(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    fitted = fit_projection(net, candidate, train, options=OPTIONS)
    assert fitted.projection.c_proj * fitted.projection.d_proj >= 64
    assert fitted.report.choice.nc4 >= fitted.report.scaled_nc4 - 0.01


def test_later_stages_take_the_seed_and_the_epsilon_of_the_candidate(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset
) -> None:
    candidate = measure_collapse(
        net, train, val, layers="^4$", options=FitOptions(device="cpu", seed=3, epsilon=0.1)
    ).candidate()
    assert (FitOptions.of(None, candidate).seed, FitOptions.of(None, candidate).epsilon) == (3, 0.1)
    with pytest.raises(UsageError, match=r"expected seed=3, with which 4 was chosen as the candidate, got 0"):
        fit_projection(net, candidate, train, val, options=FitOptions(device="cpu", epsilon=0.1))
    with pytest.raises(UsageError, match=r"expected epsilon=0\.1, .* got 0\.2"):
        fit_projection(net, candidate, train, val, options=FitOptions(device="cpu", seed=3))
    by_hand = Candidate(("4",), "by hand")
    assert FitOptions.of(OPTIONS, by_hand) is OPTIONS


def test_projection_of_another_layer_is_refused(
    net: torch.nn.Module, train: ImageDataset, val: ImageDataset, projection: FittedProjection
) -> None:
    with pytest.raises(UsageError, match=r"expected a projection of the candidate 2, got one of 4"):
        fit_psc(net, Candidate(("2",), ""), projection, train, val, options=OPTIONS)
