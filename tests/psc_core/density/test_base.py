"""Restoring a density."""

from __future__ import annotations

import json
import math

import pytest
import torch

from psc_core.density import Examples, fit_density, restore_density
from psc_core.errors import BundleError
from tests.psc_core.density.support import KINDS, images


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    again = restore_density(json.loads(json.dumps(model.config())), model.state_dict())
    assert type(again) is type(model)
    assert again.config() == model.config()
    for one, other in zip(model(z), again(z), strict=True):
        assert torch.equal(one, other)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float64 if name in ("mean", "basis", "centres") else torch.float32)
    twice = fit_density(Examples(z, labels, 3), kind=kind).state_dict()
    assert all(torch.equal(twice[name], tensor) for name, tensor in model.state_dict().items())


def test_rejects_unusable_config_and_tensors() -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3), kind="tied", pca=2)
    config, state = model.config(), dict(model.state_dict())
    with pytest.raises(BundleError, match="kind one of"):
        restore_density({**config, "kind": "pickle"}, state)
    with pytest.raises(BundleError, match="expected tensors"):
        restore_density(config, {"mean": state["mean"]})
    with pytest.raises(BundleError, match=r"tied\.centres with axes"):
        restore_density(config, {**state, "centres": state["centres"][:, :1]})
    with pytest.raises(BundleError, match="sizes"):
        restore_density(config, {**state, "centres": state["centres"][:2], "constants": state["constants"][:2]})
    with pytest.raises(BundleError, match=r"expected torch\.float64 for tied\.mean, got torch\.float32"):
        restore_density(config, {**state, "mean": state["mean"].float()})
    with pytest.raises(BundleError, match=r"expected torch\.float32 for tied\.constants, got torch\.float64"):
        restore_density(config, {**state, "constants": state["constants"].double()})
    with pytest.raises(BundleError, match="finite"):
        restore_density(config, {**state, "mean": state["mean"] * math.nan})
