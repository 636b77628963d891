"""A model is tried before it is saved and after it is loaded; what fails then is the bundle's, or the device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import PSC
from psc_core.errors import BundleError, FitError
from psc_core.model.load import build_model
from psc_core.model.pipeline import Pipeline

ALLOW = ("tests.tiny:network",)


def test_a_model_is_built_without_an_image(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks between the two whether it can afford the model."""
    ran: list[int] = []
    forward = Pipeline.forward
    monkeypatch.setattr(Pipeline, "forward", lambda self, images: (ran.append(len(images)), forward(self, images))[1])
    model = build_model(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert type(model) is PSC and ran == []
    assert model.probed() is model and ran == [3]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("full"), MemoryError("full")])
def test_out_of_memory_is_not_a_bundle_error(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(Pipeline, "forward", fail)
    with pytest.raises(type(error), match="full"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def test_text_of_a_strange_failure_is_in_the_log_alone(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("/home/somebody/secret")

    monkeypatch.setattr(Pipeline, "forward", fail)
    with pytest.raises(BundleError, match=r"do not fit together: RuntimeError, see the log; fit it again$"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert "RuntimeError('/home/somebody/secret')" in caplog.text


def test_rejects_other_features_after_fusion(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    psc.probe()
    with torch.no_grad():
        for parameter in psc.pipeline.scorer.backbone.parameters():
            parameter.mul_(1.2)
    with pytest.raises(FitError, match=r"same features from .* in fewer operations"):
        psc.probe()
    monkeypatch.setattr("psc_core.model.base.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(BundleError, match="same features"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_nan_hidden_by_a_relu(tiny_bundle: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    with torch.no_grad():  # The fused copy has weights of its own.
        next(psc.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(FitError, match=r"finite features and outputs .* some that are not"):
        psc.probe()
