"""The step of a GPU, traced with fake tensors: it reads no value back and leaves no tensor on the host."""

from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from psc_core.density import DENSITIES, Examples, fit_density
from psc_core.heads import sngp
from psc_core.model import PSC
from psc_core.settings import PRECISIONS, Precision
from psc_core.tasks.classification import Classification
from tests.fake_gpu import GPU, assert_steps_on_gpu, gpu, moved
from tests.psc_core.heads.classifiers import fit
from tests.psc_core.test_density import images


@pytest.mark.parametrize("precision", PRECISIONS)
def test_bundles(psc: PSC, shipped_bundle: Path, precision: Precision) -> None:
    for model in (psc, PSC.load(shipped_bundle, device="cpu")):
        assert_steps_on_gpu(model, precision)


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
