"""The Laplace head against the dense posterior, laplace-torch and Monte Carlo."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from psc_core.heads import softmax
from psc_core.heads import softmax as posterior
from psc_core.heads.base import entropy
from psc_core.heads.laplace import LaplaceHead, fit_kfac
from tests.psc_core.heads.classifiers import SEEDS, fit, fit_head, images, torch_laplace
from tests.reference import heads as naive


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return out


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 1.0, 10.0]))
def test_matches_the_dense_posterior(dim: int, classes: int, seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(30, dim, generator=random, dtype=torch.float64)
    weight = torch.randn(classes, dim, generator=random, dtype=torch.float64)
    bias = torch.randn(classes, generator=random, dtype=torch.float64)
    weights = 1 / torch.randint(1, 4, (30,), generator=random).double()
    kfac = fit_kfac(weight, bias, phi, weights)
    spectra = kfac.spectra(0.7)
    head = LaplaceHead(
        {
            "center": torch.zeros(dim), "inverse_scale": torch.ones(dim), "weight": weight, "bias": bias,
            "input_vectors": kfac.input_vectors, "output_vectors": kfac.output_vectors,
            "weight_spectrum": spectra[0], "bias_spectrum": spectra[1],
        },
        record={},
    )  # fmt: skip
    a, b = naive.kfac_factors(weight, bias, phi, weights.tolist())
    z = spread * phi[:8]
    output = head(z.float())
    for i in range(8):
        covariance = naive.logit_covariance(a, b, 0.7, z[i])
        probabilities = naive.probit_probabilities(weight @ z[i] + bias, covariance.diag())
        torch.testing.assert_close(output.probabilities[i].double(), probabilities, rtol=1e-4, atol=1e-5)
        expected = naive.saturating_information(weight @ z[i] + bias, covariance)
        assert output.epistemic[i].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_probabilities_match_laplace_torch(scale: float) -> None:
    z, labels = images(300, 6, 3, scale=scale)
    head = fit(scale=scale)
    assert isinstance(head, LaplaceHead)
    posterior, _ = torch_laplace(head, z, labels)
    for factor in (1.0, 5.0, 50.0):
        far = head.center + factor * (z[:100] - head.center)
        expected = posterior(head.standardise(far).double(), pred_type="glm", link_approx="probit")
        torch.testing.assert_close(head(far).probabilities.double(), expected, rtol=0, atol=1e-5)


def test_samples_match_laplace_torch() -> None:
    z, labels = images(60, 6, 3)
    head = fit(n=60)
    assert isinstance(head, LaplaceHead)
    posterior, _ = torch_laplace(head, z, labels)
    far = 4 * z[:40]
    ours, _ = naive.sampled(head, far, 4000, seed=3)
    torch.manual_seed(0)
    for prediction in ("nn", "glm"):
        theirs = posterior(head.standardise(far).double(), pred_type=prediction, link_approx="mc", n_samples=4000)
        # standard error of one mean of numbers in [0, 1]: at most 0.5 / √4000 = 0.008; 5 × √2 of them
        torch.testing.assert_close(ours, theirs.double(), rtol=0, atol=0.056)


@pytest.mark.parametrize(("dim", "classes"), [(6, 3), (20, 10)])
def test_mutual_information_matches_samples(dim: int, classes: int) -> None:
    z, _ = images(200, dim, classes, seed=7)
    head = fit(n=3000, dim=dim, classes=classes)
    assert isinstance(head, LaplaceHead)
    probabilities, expected = naive.sampled(head, z, 2000, seed=0)
    information = entropy(probabilities) - expected
    aleatoric, epistemic = head.decompose(z)
    assert torch.equal(epistemic, head(z).epistemic)
    torch.testing.assert_close(epistemic.double(), information, rtol=0.1, atol=1.5e-3)
    # The served entropy exceeds that of the samples, because plain probit counts the variance that all logits share.
    rest = entropy(head(z).probabilities.double()) - information
    torch.testing.assert_close(aleatoric.double(), rest, rtol=0.1, atol=0.02)
    assert (aleatoric.double() >= 0.9 * expected - 0.02).all()
    assert epistemic.mean().item() == pytest.approx(information.mean().item(), rel=0.03)
    far = head.decompose(1000 * z)
    assert ((far.epistemic >= 0) & (far.aleatoric >= 0) & (far.epistemic <= math.log(classes))).all()


def test_memory_with_a_thousand_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "ITERATIONS", 2)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1.0,))
    monkeypatch.setattr(posterior, "STRONGER", (1.0,))
    dim, classes, examples = 2048, 1000, 1000
    z, labels = images(examples, dim, classes)
    with LargestTensor() as largest:
        head = fit_head(z, labels, z[:64], labels[:64], num_classes=classes)
        assert isinstance(head, LaplaceHead)
        output = head(z[:64])
    assert output.probabilities.shape == (64, classes)
    assert output.epistemic.isfinite().all()
    weights = classes * (dim + 1)
    assert largest.elements <= max(dim * dim, 100 * weights)  # L-BFGS keeps pairs of gradients
    assert largest.elements < classes * weights
