"""The four calls of the paper's pseudo-code: results, and clear errors before anything is fitted."""

from __future__ import annotations

import pytest
import torch

from psc_core import FitOptions, fit_projection, fit_psc, measure_collapse
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError, UsageError
from psc_core.fitting.stages import FittedProjection

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
    monkeypatch.setattr("psc_core.model.predictor.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(FitError, match="same features"):
        fit_psc(net, Candidate(("4",), ""), projection, train, val, head="duq", options=OPTIONS)


def test_sizes_without_validation_images(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    fitted = fit_projection(net, candidate, train, options=OPTIONS)
    assert fitted.projection.c_proj * fitted.projection.d_proj >= 64
    assert fitted.report.choice.nc4 >= fitted.report.scaled_nc4 - 0.01
