"""The random-feature Gaussian process against its kernel and a dense posterior."""

import math

import pytest
import torch

from psc_core.heads import sngp, softmax
from psc_core.heads.base import ClassifierData, fit_standardisation
from tests.psc_core.heads.classifiers import fit, fit_head, images, maximum
from tests.reference import heads as naive


def test_features_approximate_the_rbf_kernel() -> None:
    random = torch.Generator().manual_seed(0)
    phi = torch.randn(20, 3, generator=random)
    omega, phases = torch.randn(3, 20000, generator=random), 2 * math.pi * torch.rand(20000, generator=random)
    psi = sngp.random_features(phi, omega / 1.5, phases)
    expected = torch.exp(-torch.cdist(phi, phi).square() / (2 * 1.5**2))
    torch.testing.assert_close(psi @ psi.T / 20000, expected, rtol=0, atol=0.05)


def test_variance_matches_the_dense_posterior() -> None:
    z, _ = images(200, 4, 3)
    head = fit("sngp", n=200, dim=4)
    assert isinstance(head, sngp.SngpHead)
    psi = sngp.random_features(head.standardise(z), head.frequencies, head.phases).double()
    logits = psi @ head.weight.double().T + head.bias
    weight, bias = maximum(head)
    p = (psi @ weight.T + bias).softmax(1).amax(1)
    output = head(z[:10])
    for i in range(10):
        variance = naive.random_feature_variance(psi, p, head.record["prior_precision"], psi[i])
        variance /= head.record["temperature"] ** 2
        assert output.epistemic[i].item() == pytest.approx(variance, rel=1e-2)
        expected = naive.probit_probabilities(logits[i], torch.tensor(variance))
        torch.testing.assert_close(output.probabilities[i].double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("stripes", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_length_scale_matches_search(stripes: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (0.1,))
    random = torch.Generator().manual_seed(seed)
    z = torch.rand(60, 2, generator=random)
    z[1] = z[0]  # a distance of zero does not count
    labels = (z[:, 0] * stripes).long() % 2
    phi = fit_standardisation(z)
    omega, phases = torch.randn(2, 20, generator=random), 2 * math.pi * torch.rand(20, generator=random)
    val, val_labels = torch.rand(40, 2, generator=random), torch.arange(40) % 2
    val[:, 0] = (val[:, 0] + torch.arange(40) % stripes) / stripes
    data = ClassifierData(
        train=phi(z), train_labels=labels, weights=torch.ones(len(z)).double(), selection=phi(val)[:].float(),
        selection_labels=val_labels, num_classes=2, seed=seed, standardisation=phi,
    )  # fmt: skip
    expected = naive.length_scale(
        phi(z)[:], labels, phi(val)[:], val_labels, omega.double(), phases.double(), precision=0.1
    )
    assert sngp.choose_length_scale(data, omega, phases) == pytest.approx(expected, rel=1e-5)


def test_seed_determines_the_fit() -> None:
    train, val = images(200, 4, 3), images(100, 4, 3, seed=1)
    one, same, other = (fit_head(*train, *val, num_classes=3, kind="sngp", seed=s) for s in (0, 0, 1))
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert not torch.equal(one.state_dict()["phases"], other.state_dict()["phases"])
