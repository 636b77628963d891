"""Density and head on the features of the training images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from psc_core import FitOptions, fit_psc
from psc_core.collapse.report import Candidate
from psc_core.compute.distributed import Reducer
from psc_core.data.dataset import ImageDataset
from psc_core.fitting.parts import FittedProjection
from psc_core.fitting.scorer import cut, embed
from psc_core.heads.fit import sngp, softmax

OPTIONS = FitOptions(device="cpu")


def test_seed_reaches_the_head(
    net: torch.nn.Module,
    train: ImageDataset,
    val: ImageDataset,
    projection: FittedProjection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 8)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1.0,))
    candidate = Candidate(("4",), "")
    one, two = (
        fit_psc(
            net, candidate, projection, train, val, head="sngp", options=replace(OPTIONS, seed=seed)
        ).pipeline.state_dict()
        for seed in (0, 1)
    )
    # The length-scale moves the frequencies alone.
    assert not torch.equal(one["scorer.head.phases"], two["scorer.head.phases"])


def test_features_are_ordered_by_class_and_each_is_of_its_image(
    net: torch.nn.Module, val: ImageDataset, projection: FittedProjection, tmp_path: Path
) -> None:
    compute = OPTIONS.compute()
    backbone = cut(net, ("4",), val, compute, keep_output=False)
    found = embed(backbone, projection.projection, val, compute, tmp_path / "z", Reducer(), pooled=True)
    order = val.labels.argsort(stable=True)
    assert torch.equal(found.labels, val.labels[order])
    with torch.inference_mode():
        features = backbone(val.preprocess.standardise(next(val.batches(len(val))).images))[0]
        z = projection.projection(features)
    torch.testing.assert_close(found.z[:], z[order], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.density_input[:], features[0].mean(2)[order], rtol=1e-4, atol=1e-4)
