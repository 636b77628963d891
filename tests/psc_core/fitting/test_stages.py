"""The four calls of the paper's pseudo-code: results, and clear errors before anything is fitted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from psc_core import FitOptions, fit_projection, fit_psc, measure_collapse
from psc_core.collapse.report import Candidate
from psc_core.data.dataset import ImageDataset
from psc_core.errors import FitError, UsageError
from psc_core.fitting.stages import FittedProjection
from psc_core.heads.fit import sngp, softmax
from psc_core.projection.fit.ranks import choose_ranks

FACTORY = "tests.tiny:network"
OPTIONS = FitOptions(device="cpu")


def test_seed_reaches_the_head(
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
    # The length-scale moves the frequencies alone.
    assert not torch.equal(one["scorer.head.phases"], two["scorer.head.phases"])


def test_unknown_options(net: torch.nn.Module, train: ImageDataset, val: ImageDataset) -> None:
    candidate = measure_collapse(net, train, val, layers="^4$", options=OPTIONS).candidate()
    with pytest.raises(UsageError, match="'tucker'"):
        fit_projection(net, candidate, train, method="pca", options=OPTIONS)
    with pytest.raises(UsageError, match="precision"):
        fit_projection(net, candidate, train, options=FitOptions(device="cpu", precision="fp8"))


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


def test_minimum_dim_above_the_layer() -> None:
    flat = torch.full((1, 16), 0.9)
    choice = choose_ranks(flat, flat, epsilon=0.2, reference_nc4=0.9, minimum=64)
    assert (choice.c_proj, choice.d_proj) == (1, 16)
