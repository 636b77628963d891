"""A model is tried before it is saved and after it is loaded; what fails then is the bundle's, or the device's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from psc_core import PSC
from psc_core.errors import BundleError, FitError
from psc_core.model import build_model
from psc_core.pipeline import Pipeline
from tests import tiny

ALLOW = ("tests.tiny:network",)


def test_a_model_is_built_without_an_image(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service looks between the two whether it can afford the model."""
    ran: list[int] = []
    forward = Pipeline.forward
    monkeypatch.setattr(Pipeline, "forward", lambda self, images: (ran.append(len(images)), forward(self, images))[1])
    model = build_model(tiny_bundle, device="cpu", allow_factories=ALLOW)
    assert type(model) is PSC and ran == []
    assert model.probed() is model and ran == [3]


def test_models_are_keys(tiny_bundle: Path) -> None:
    first, second = (PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW) for _ in range(2))
    assert first == first and len({first, first, second}) == 2


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
    monkeypatch.setattr("psc_core.model.FUSION_TOLERANCE", {"fp32": -1.0})
    with pytest.raises(BundleError, match="same features"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def test_rejects_nan_hidden_by_a_relu(tiny_bundle: Path) -> None:
    psc = PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)
    with torch.no_grad():  # The fused copy has weights of its own.
        next(psc.backbone.parameters()).fill_(torch.nan)
    with pytest.raises(FitError, match=r"finite features and outputs .* some that are not"):
        psc.probe()


def test_rejects_a_network_that_reads_the_whole_batch(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a factory that was changed after the fit builds one."""

    class WholeBatch(torch.nn.ReLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.01 * x.mean(0)

    network = tiny.network
    monkeypatch.setattr(tiny, "network", lambda **args: whole_batch(network(**args), WholeBatch()))
    with pytest.raises(BundleError, match="the other images of the batch"):
        PSC.load(tiny_bundle, device="cpu", allow_factories=ALLOW)


def whole_batch(net: torch.nn.Sequential, layer: torch.nn.Module) -> torch.nn.Sequential:
    at = next(name for name, module in net.named_modules() if isinstance(module, torch.nn.ReLU))
    setattr(net, at, layer)
    return net
