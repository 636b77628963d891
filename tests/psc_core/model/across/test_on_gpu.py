"""The step of a GPU, traced with fake tensors: it reads no value back and leaves no tensor on the host."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from psc_core.density import DENSITIES, Examples, fit_density
from psc_core.heads import sngp
from psc_core.model import PSC
from psc_core.network.cut import truncate
from psc_core.network.load import load_network
from psc_core.settings import PRECISIONS, Precision
from psc_core.tasks.classification import Classification
from tests.fake_gpu import GPU, assert_steps_on_gpu, gpu, moved
from tests.psc_core.density.support import images
from tests.psc_core.heads.classifiers import fit

FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool((x > 0).all()),
    "equal": lambda x: torch.equal(x, x),
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "download": lambda x: x.cpu(),
    "upload": lambda x: x + torch.tensor([1.0, 2.0]).to(GPU),
    "upload of a scalar": lambda x: x + torch.tensor(1.0).to(GPU),
}


@pytest.mark.parametrize("name", FAULTS)
def test_notices(name: str) -> None:
    with gpu(FakeTensorMode()) as watch:
        FAULTS[name](torch.ones(2, 2, device=GPU))
    assert watch.waits or watch.crossings


@pytest.mark.parametrize(
    ("fault", "error"),
    [(torch.nonzero, DynamicOutputShapeException), (lambda x: x + torch.ones(2), RuntimeError)],
    ids=["nonzero", "two devices"],
)
def test_refuses(fault: Callable[[Tensor], Tensor], error: type[Exception]) -> None:
    with gpu(FakeTensorMode()), pytest.raises(error):
        fault(torch.ones(2, 2, device=GPU))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bundles(psc: PSC, shipped_bundle: Path, precision: Precision) -> None:
    for model in (psc, PSC.load(shipped_bundle, device="cpu")):
        assert_steps_on_gpu(model, precision)


NETWORKS = {
    "torchvision:mobilenet_v3_small": "features.6",
    "torchvision:shufflenet_v2_x0_5": "stage3",
    "torchvision:regnet_x_400mf": "trunk_output.block2",
    "tests.tiny:network": "4",
    "tests.tiny:LeNet": "conv2",
}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("spec", NETWORKS)
def test_networks(spec: str, precision: Precision) -> None:
    net = load_network(spec, num_classes=10)
    channels = next(module for module in net.modules() if isinstance(module, nn.Conv2d)).in_channels
    side = 28 if spec == "tests.tiny:LeNet" else 64
    trial = torch.rand(1, channels, side, side)
    backbone = truncate(net.eval(), [NETWORKS[spec]], keep_output=True, trial=trial)
    assert backbone.is_traced
    expected, logits = backbone(trial)
    fake = FakeTensorMode()
    there = moved(backbone, fake)
    with fake:
        there = there.fused(precision)
    with gpu(fake) as watch, torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        (features,), of_output = there(torch.zeros(1, channels, side, side, device=GPU))
    assert logits is not None and of_output is not None
    assert (features.shape, of_output.shape) == (expected[0].shape, logits.shape)
    assert features.dtype == (torch.bfloat16 if precision == "bf16" else torch.float32)
    assert features.device == of_output.device == GPU
    assert watch.waits == watch.crossings == []


@pytest.mark.parametrize("kind", DENSITIES)
def test_densities(kind: str) -> None:
    z, labels = images(300, 4, 3)
    fake = FakeTensorMode()
    density = moved(fit_density(Examples(z, labels, 3), kind=kind), fake)
    with gpu(fake) as watch:
        there = torch.zeros(5, 4, device=GPU)
        outputs = (*density(there), *density.explain(there))
    assert {part.device for part in outputs} == {GPU}
    assert watch.waits == watch.crossings == []


@pytest.mark.parametrize("kind", Classification.heads)
def test_heads(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sngp, "FEATURES", 64)
    fake = FakeTensorMode()
    head = moved(fit(kind), fake)
    with gpu(fake) as watch:
        there = torch.zeros(5, 6, device=GPU)
        outputs = (*head(there), *head.decompose(there))
    assert {part.device for part in outputs} == {GPU}
    assert watch.waits == watch.crossings == []
