"""The Laplace head: factors, posterior, probabilities and gradients against dense twins."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.evaluation.baselines import fit_temperature
from psc_core.heads import softmax
from psc_core.heads.base import entropy
from psc_core.heads.laplace import LaplaceHead, fit_kfac
from psc_core.heads.softmax import COST, choose_posterior, choose_temperature
from tests.psc_core.heads.classifiers import SEEDS, LargestTensor, fit, fit_head, images, maximum, torch_laplace
from tests.reference import heads as naive


def test_factors_match_laplace_torch() -> None:
    z, labels = images(130, 7, 4)
    head = fit(dim=7, classes=4)
    assert isinstance(head, LaplaceHead)
    posterior, phi = torch_laplace(head, z, labels)
    kfac = fit_kfac(*maximum(head), phi, torch.ones(len(phi)).double())
    for values, vectors, factor in (
        (kfac.input_values, kfac.input_vectors, posterior.H_facs.kfacs[0][1]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[0][0]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[1][0]),
    ):
        torch.testing.assert_close((vectors * values) @ vectors.T, factor)


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_image_with_several_labels_is_one_observation(kind: str) -> None:
    """Ten copies of every label leave the posterior as wide as it was; as ten images they make it narrower."""
    (z, labels), val = images(300, 6, 3), images(150, 6, 3, seed=1)
    shown = torch.arange(300).repeat(10)

    information = {}
    for images_of in (shown, None):
        head = fit_head(z[shown], labels[shown], *val, num_classes=3, kind=kind, images=images_of)
        if isinstance(head, LaplaceHead):
            precision = head.get_buffer("weight_spectrum").reciprocal()
        else:
            root = head.get_buffer("covariance_root").double()
            precision = torch.linalg.inv(root @ root.T).diagonal()
        information[images_of is None] = precision / head.record["temperature"] ** 2 - head.record["prior_precision"]
    torch.testing.assert_close(10 * information[False], information[True], rtol=1e-2, atol=1e-2)


def drawn(n: int, *, seed: int = 0, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Logits, and labels drawn from their probabilities."""
    random = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(n, 3, generator=random, dtype=torch.float64)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=random).squeeze(1)


def test_keeps_the_prior_of_the_weights_unless_it_costs() -> None:
    """A variance that all images share is undone by T; one that strikes at random is not, and a stronger prior is."""
    logits, labels = drawn(4000)
    alike = torch.ones(4000, 1).double()
    kept = choose_posterior(logits, lambda tau: alike / tau, labels, prior_precision=0.5)
    assert kept.prior_precision == 0.5
    assert kept.temperature < 1
    unequal = torch.rand(4000, 1, generator=torch.Generator().manual_seed(1)).double() ** 4
    stronger = choose_posterior(logits, lambda tau: 100 * unequal / tau, labels, prior_precision=0.5)
    assert stronger.prior_precision > 0.5
    narrow = choose_posterior(logits, lambda tau: 100 * unequal / tau, labels, prior_precision=1e7)
    assert narrow[:2] == (1e7, 1.0)
    assert stronger.selection_nll <= (1 + 1.1 * COST[0]) * narrow.selection_nll


@pytest.mark.parametrize("precisions", [softmax.PRIOR_PRECISIONS, softmax.PRIOR_PRECISIONS[-1:]])
def test_separable_classes_are_not_flattened(precisions: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is right: Kronecker factors at the weights' own prior would halve the probabilities."""
    means = 4 * torch.randn(10, 64, generator=torch.Generator().manual_seed(1))
    labels = torch.arange(1500) % 10
    z = means[labels] + torch.randn(1500, 64, generator=torch.Generator().manual_seed(2))
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", precisions)
    head = fit_head(z[:1000], labels[:1000], z[1000:], labels[1000:], num_classes=10)
    assert head.record["prior_precision"] > 10 * head.record["map_precision"]
    assert head(z).probabilities.amax(1).mean() > 0.99
    assert head.record["val_nll"] < head.record["map_val_nll"] + 2 * COST[1]
    if len(precisions) == 1:  # the weights of the least NLL, which a stronger prior may exceed by what it is worth
        assert head.record["val_nll"] < 2 * COST[1]
    else:
        assert 500 * head.record["map_val_nll"] < math.log(500) / 2


def test_keeps_temperature_one_within_its_error() -> None:
    """The honest logits keep 1 in at least nine of ten draws; a deviation of several errors is corrected."""
    none, ones = torch.zeros(500, 1).double(), 0
    for seed in range(40):
        honest, labels = drawn(500, seed=seed)
        ones += choose_temperature(honest, none, labels) == 1.0
        assert choose_temperature(2 * honest, none, labels) > 1.5
    assert 36 <= ones <= 40


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_temperature_undoes_shrunk_weights(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a strong prior keeps far too small are served larger."""
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1e3,))
    monkeypatch.setattr(softmax, "STRONGER", (1e3,))
    head = fit(kind)
    assert head.record["temperature"] < 0.6
    assert head.record["val_nll"] < 0.8 * head.record["map_val_nll"]
    z, labels = images(150, 6, 3, seed=1)
    served = softmax.nll(head(z).probabilities.log(), labels).mean().item()
    assert served == pytest.approx(head.record["val_nll"], abs=1e-4)


@settings(max_examples=15)
@given(st.integers(2, 40), SEEDS, st.sampled_from([0.3, 1.0, 3.0]), st.booleans())
def test_choice_matches_search(n: int, seed: int, spread: float, by_class: bool) -> None:
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (n,), generator=random)
    mean = spread * torch.randn(n, 3, generator=random, dtype=torch.float64) + 2 * torch.eye(3)[labels].double()
    widths = torch.rand(n, 3 if by_class else 1, generator=random, dtype=torch.float64) ** 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax, "STRONGER", (1.0, 10.0, 1000.0))
        choice = choose_posterior(mean, lambda tau: widths / tau, labels, prior_precision=0.02)
    variances = {0.02 * factor: widths / (0.02 * factor) for factor in (1.0, 10.0, 1000.0)}
    precision, temperature = naive.choose_posterior(mean, variances, labels, *COST)
    assert choice.prior_precision == precision
    assert choice.temperature == pytest.approx(temperature, rel=1e-3)
    loss = naive.tempered_loss(mean, variances[precision], choice.temperature, labels)
    assert choice.selection_nll == pytest.approx(loss, rel=1e-9)


def test_prior_limits_the_confidence_of_few_images() -> None:
    """Twenty images that are all right would make the probabilities certain."""
    mean, labels = 5.0 * torch.eye(4).repeat(5, 1), torch.arange(4).repeat(5)
    assert fit_temperature(mean, labels) < 0.2
    assert 0.6 < choose_temperature(mean, torch.zeros(20, 1), labels) <= 1.0


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_features_of_a_large_mean_lose_no_digits(offset: float) -> None:
    """What float32 leaves of the features themselves is known to the reference too."""
    z, labels = images(1000, 100, 5)
    head = fit_head(z[:500] + offset, labels[:500], z[500:] + offset, labels[500:], num_classes=5)
    assert isinstance(head, LaplaceHead)
    wide = {name: head.get_buffer(name).double() for name in head.layout}
    phi = (z[500:] + offset - head.center).double() * wide["inverse_scale"]
    spectrum = (phi @ wide["input_vectors"]).square() @ wide["weight_spectrum"] + wide["bias_spectrum"]
    variance = spectrum @ wide["output_vectors"].square().T
    exact = softmax.divide_by_temperature(phi @ wide["weight"].T + wide["bias"], variance, 1.0).softmax(1)
    torch.testing.assert_close(head(z[500:] + offset).probabilities.double(), exact, rtol=0, atol=1e-5)


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


def test_memory_with_many_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "STEPS", 2)
    monkeypatch.setattr(softmax, "PRIOR_PRECISIONS", (1.0,))
    monkeypatch.setattr(softmax, "STRONGER", (1.0,))
    dim, classes, examples = 512, 500, 500
    z, labels = images(examples, dim, classes)
    with LargestTensor() as largest:
        with pytest.warns(UserWarning, match="not at their optimum"):  # after two steps
            head = fit_head(z, labels, z[:64], labels[:64], num_classes=classes)
        assert isinstance(head, LaplaceHead)
        output = head(z[:64])
    assert output.probabilities.shape == (64, classes)
    assert output.epistemic.isfinite().all()
    weights = classes * (dim + 1)
    assert largest.elements <= 3 * weights < classes * weights
