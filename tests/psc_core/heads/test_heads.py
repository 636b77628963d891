from __future__ import annotations

import json
import math
import subprocess
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from psc_core.errors import BundleError, FitError, UsageError
from psc_core.heads import HEADS, Head, LaplaceHead, duq, entropy, restore_head, sngp
from psc_core.heads.fit import duq as duq_fit
from psc_core.heads.fit import laplace, posterior, preconditioning, softmax
from psc_core.heads.fit import sngp as sngp_fit
from psc_core.heads.fit.data import fit_standardisation
from psc_core.heads.fit.head import fit_head
from psc_core.heads.fit.kfac import fit_kfac
from psc_core.heads.fit.posterior import PRIOR_IMAGES, choose_posterior
from psc_core.heads.fit.temperature import fit_temperature
from tests.reference import heads as naive

KINDS = sorted(HEADS)
SEEDS = st.integers(0, 2**16)


def images(n: int, dim: int, classes: int, *, seed: int = 0, scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Overlapping classes of unit covariance."""
    random = torch.Generator().manual_seed(seed)
    means = torch.randn(classes, dim, generator=torch.Generator().manual_seed(99))
    labels = torch.arange(n) % classes
    return scale * (means[labels] + torch.randn(n, dim, generator=random)), labels


@pytest.fixture(autouse=True)
def few_features(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sngp_fit, "FEATURES", 64)
    yield


def fit(kind: str = "laplace", *, n: int = 300, dim: int = 6, classes: int = 3, scale: float = 1.0) -> Head:
    train, val = images(n, dim, classes, scale=scale), images(150, dim, classes, seed=1, scale=scale)
    return fit_head(*train, *val, num_classes=classes, kind=kind)


def maximum(head: Any) -> tuple[Tensor, Tensor]:
    """The maximum a posteriori W and b, where the posterior was taken: the stored ones, times the temperature."""
    temperature = head.record["temperature"]
    return head.weight.double() * temperature, head.bias.double() * temperature


def torch_laplace(head: LaplaceHead, z: Tensor, labels: Tensor) -> tuple[Any, Tensor]:
    """laplace-torch with its own curvature at the head's maximum and prior, then around the head's mean, and φ."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from laplace import Laplace
    layer = nn.Linear(z.shape[1], len(head.bias)).double()
    with torch.no_grad():
        for parameter, value in zip(layer.parameters(), maximum(head), strict=True):
            parameter.copy_(value)
    phi = head.standardise(z).double()
    posterior = Laplace(layer, "classification", subset_of_weights="all", hessian_structure="kron")
    data = torch.utils.data.TensorDataset(phi, labels)
    posterior.fit(torch.utils.data.DataLoader(data, batch_size=64))
    posterior.prior_precision = head.record["prior_precision"]
    posterior.mean /= head.record["temperature"]
    nn.utils.vector_to_parameters(posterior.mean, layer.parameters())
    return posterior, phi


@settings(max_examples=15)
@given(st.integers(1, 6), st.integers(2, 5), SEEDS, st.sampled_from([1e-2, 1.0, 1e3]))
def test_objective_and_gradient_are_autograds(dim: int, classes: int, seed: int, precision: float) -> None:
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(20, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (20,), generator=random)
    theta = torch.randn(classes, dim + 1, generator=random, dtype=torch.float64).requires_grad_()
    expected = naive.softmax_objective(theta, phi, labels, precision)
    expected.backward()
    loss, gradient = softmax.objective(theta.detach(), phi, labels, precision=precision)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradient, theta.grad)


def test_logistic_regression_is_at_the_minimum_and_deterministic() -> None:
    z, labels = images(400, 5, 4)
    start = torch.zeros(4, 6, dtype=torch.float64)
    weight, bias = softmax.fit_softmax(z, labels, precision=1.0, start=start)
    theta = torch.cat([weight, bias[:, None]], dim=1)
    _, gradient = softmax.objective(theta, z.double(), labels, precision=1.0)
    assert gradient.abs().max() < 1e-5
    again, _ = softmax.fit_softmax(z, labels, precision=1.0, start=start)
    assert torch.equal(weight, again)
    elsewhere, _ = softmax.fit_softmax(z, labels, precision=1.0, start=start + torch.randn(4, 6))
    torch.testing.assert_close(weight, elsewhere, rtol=1e-3, atol=1e-3)


@settings(max_examples=15)
@given(st.integers(1, 4), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 10.0]), st.booleans())
def test_variables_of_the_fit(dim: int, classes: int, seed: int, precision: float, exact: bool) -> None:
    """There and back; gradients by the chain rule; curvature near the identity."""
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(40, dim, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (40,), generator=random)
    theta = float(exact) * torch.randn(classes, dim + 1, generator=random, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preconditioning, "CURVATURE_ROWS", 40)
        patch.setattr(preconditioning, "EXACT_REPEATS", 1 if exact else 2)
        variables = preconditioning.variables_at(theta, phi, precision=precision)
    assert isinstance(variables, preconditioning.ExactVariables if exact else preconditioning.KroneckerVariables)
    v = variables.of(theta)
    torch.testing.assert_close(variables.theta(v), theta)

    def loss(at: Tensor) -> Tensor:
        return naive.softmax_objective(variables.theta(at), phi, labels, precision)

    _, gradient = softmax.objective(theta, phi, labels, precision=precision)
    (expected,) = torch.autograd.grad(loss(v.requires_grad_()), v)
    torch.testing.assert_close(variables.gradient(gradient), expected)
    curvature = torch.autograd.functional.hessian(loss, v.detach()).reshape(v.numel(), -1)
    # with p the same for every row, as at θ = 0, the curvature is a Kronecker product
    torch.testing.assert_close(curvature, torch.eye(v.numel(), dtype=torch.float64), rtol=0, atol=1e-8)


def test_softmax_path_takes_the_best_validation_nll() -> None:
    (z, y), (z_val, y_val) = images(40, 30, 3), images(300, 30, 3, seed=1)
    chosen = softmax.choose_softmax(z, y, z_val, y_val, num_classes=3)
    start = torch.zeros(3, 31, dtype=torch.float64)
    for precision in softmax.PRECISIONS:
        weight, bias = softmax.fit_softmax(z, y, precision=precision, start=start)
        nll = posterior.nll(z_val @ weight.float().T + bias.float(), y_val).mean().item()
        assert chosen.val_nll <= nll + 1e-4


@settings(max_examples=15)
@given(st.integers(1, 5), st.integers(2, 4), SEEDS, st.sampled_from([0.1, 1.0, 10.0]))
def test_laplace_is_the_dense_posterior(dim: int, classes: int, seed: int, spread: float) -> None:
    random = torch.Generator().manual_seed(seed)
    phi = torch.randn(30, dim, generator=random, dtype=torch.float64)
    weight = torch.randn(classes, dim, generator=random, dtype=torch.float64)
    bias = torch.randn(classes, generator=random, dtype=torch.float64)
    labels = torch.randint(0, classes, (30,), generator=random)
    kfac = fit_kfac(weight, bias, phi, labels)
    spectra = kfac.spectra(0.7)
    head = LaplaceHead(
        {
            "center": torch.zeros(dim), "inverse_scale": torch.ones(dim), "weight": weight, "bias": bias,
            "input_vectors": kfac.input_vectors, "output_vectors": kfac.output_vectors,
            "weight_spectrum": spectra[0], "bias_spectrum": spectra[1],
        },
        record={},
    )  # fmt: skip
    a, b = naive.kfac_factors(weight, bias, phi)
    z = spread * phi[:8]
    output = head(z.float())
    for i in range(8):
        covariance = naive.logit_covariance(a, b, 0.7, z[i])
        probabilities = naive.probit_probabilities(weight @ z[i] + bias, covariance.diag())
        torch.testing.assert_close(output.probabilities[i].double(), probabilities, rtol=1e-4, atol=1e-5)
        expected = naive.saturating_information(weight @ z[i] + bias, covariance)
        assert output.epistemic[i].item() == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_laplace_is_laplace_torchs_probit(scale: float) -> None:
    z, labels = images(300, 6, 3, scale=scale)
    head = fit(scale=scale)
    assert isinstance(head, LaplaceHead)
    posterior, _ = torch_laplace(head, z, labels)
    for factor in (1.0, 5.0, 50.0):
        far = head.center + factor * (z[:100] - head.center)
        expected = posterior(head.standardise(far).double(), pred_type="glm", link_approx="probit")
        torch.testing.assert_close(head(far).probabilities.double(), expected, rtol=0, atol=1e-5)


def test_our_curvature_is_laplace_torchs() -> None:
    z, labels = images(130, 7, 4)
    head = fit(dim=7, classes=4)
    assert isinstance(head, LaplaceHead)
    posterior, phi = torch_laplace(head, z, labels)
    kfac = fit_kfac(*maximum(head), phi, labels)
    for values, vectors, factor in (
        (kfac.input_values, kfac.input_vectors, posterior.H_facs.kfacs[0][1]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[0][0]),
        (kfac.output_values, kfac.output_vectors, posterior.H_facs.kfacs[1][0]),
    ):
        torch.testing.assert_close((vectors * values) @ vectors.T, factor)


def test_monte_carlo_is_laplace_torchs() -> None:
    z, labels = images(60, 6, 3)
    head = fit(n=60)
    assert isinstance(head, LaplaceHead)
    posterior, _ = torch_laplace(head, z, labels)
    far = 4 * z[:40]
    ours = head.sample(far, 4000, seed=3)
    torch.manual_seed(0)
    for prediction in ("nn", "glm"):
        theirs = posterior(head.standardise(far).double(), pred_type=prediction, link_approx="mc", n_samples=4000)
        # standard error of one mean of numbers in [0, 1]: at most 0.5 / √4000 = 0.008; 5 × √2 of them
        torch.testing.assert_close(ours.probabilities.double(), theirs.double(), rtol=0, atol=0.056)
    torch.testing.assert_close(ours.predictive_entropy, entropy(ours.probabilities))
    assert (ours.mutual_information >= -1e-6).all()
    assert torch.equal(ours.probabilities, head.sample(far, 4000, seed=3).probabilities)


@pytest.mark.parametrize(("dim", "classes"), [(6, 3), (20, 10)])
def test_closed_form_information_is_monte_carlos(dim: int, classes: int) -> None:
    z, _ = images(200, dim, classes, seed=7)
    head = fit(n=3000, dim=dim, classes=classes)
    assert isinstance(head, LaplaceHead)
    sampled = head.sample(z, 2000, seed=0)
    aleatoric, epistemic = head.split(z)
    assert torch.equal(epistemic, head(z).epistemic)
    torch.testing.assert_close(epistemic, sampled.mutual_information, rtol=0.1, atol=1.5e-3)
    torch.testing.assert_close(aleatoric, sampled.aleatoric, rtol=0.1, atol=0.02)
    assert epistemic.mean().item() == pytest.approx(sampled.mutual_information.mean().item(), rel=0.03)
    far = head.split(1000 * z)
    assert ((far.epistemic >= 0) & (far.aleatoric >= 0) & (far.epistemic <= math.log(classes))).all()


class LargestTensor(TorchDispatchMode):
    """Number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for part in out if isinstance(out, tuple | list) else [out]:
            if isinstance(part, Tensor):
                self.elements = max(self.elements, part.untyped_storage().nbytes() // part.element_size())
        return out


def test_a_thousand_classes_at_2048_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "ITERATIONS", 2)
    monkeypatch.setattr(softmax, "PRECISIONS", (1.0,))
    monkeypatch.setattr(laplace, "PRECISIONS", (1.0,))
    dim, classes, rows = 2048, 1000, 1000
    z, labels = images(rows, dim, classes)
    with LargestTensor() as largest:
        head = fit_head(z, labels, z[:64], labels[:64], num_classes=classes)
        assert isinstance(head, LaplaceHead)
        output, sampled = head(z[:64]), head.sample(z[:64], 2, seed=0)
    assert output.probabilities.shape == sampled.probabilities.shape == (64, classes)
    assert output.epistemic.isfinite().all()
    weights = classes * (dim + 1)
    assert largest.elements <= max(dim * dim, 100 * weights)  # L-BFGS keeps pairs of gradients
    assert largest.elements < classes * weights


def test_posterior_rule() -> None:
    """Noise costs a wide posterior, not what flattens all alike; one that needs no temperature comes first."""
    random = torch.Generator().manual_seed(0)
    honest = 3 * torch.randn(4000, 3, generator=random, dtype=torch.float64)
    labels = torch.multinomial(honest.softmax(1), 1, generator=random).squeeze(1)
    noise = torch.randn(4000, 3, generator=random, dtype=torch.float64)
    spoilt = {0.1: 1.0, 1.0: 0.0, 10.0: 0.0, 100.0: 0.0}

    def logits_with(precision: float) -> Tensor:
        return (honest + spoilt[precision] * noise) / 2

    choice = choose_posterior(logits_with, labels, tuple(spoilt))
    assert choice.precision == 1.0
    assert choice.temperature == pytest.approx(0.5, abs=0.03)
    best = fit_temperature(logits_with(1.0), labels, prior_images=PRIOR_IMAGES)
    assert choice.temperature == pytest.approx(best, rel=1e-9)
    assert choice.val_nll == pytest.approx(posterior.nll(logits_with(1.0) / best, labels).mean().item())
    flattened = choose_posterior(lambda precision: honest * precision / (1 + precision), labels, (1.0, 1000.0))
    assert flattened[:2] == (1000.0, 1.0)


def test_a_temperature_within_its_error_is_not_taken() -> None:
    """The honest logits keep 1 in at least nine of ten draws; a deviation of several errors is corrected."""
    random = torch.Generator().manual_seed(0)
    ones, best = 0, []
    for _ in range(40):
        honest = 3 * torch.randn(500, 3, generator=random, dtype=torch.float64)
        labels = torch.multinomial(honest.softmax(1), 1, generator=random).squeeze(1)
        choice = choose_posterior(lambda _, logits=honest: logits, labels, (1.0,))
        ones += choice.temperature == 1.0
        best.append(fit_temperature(honest, labels, prior_images=PRIOR_IMAGES))
        assert choice.val_nll == pytest.approx(posterior.nll(honest / choice.temperature, labels).mean().item())
        assert choose_posterior(lambda _, logits=honest: 2 * logits, labels, (1.0,)).temperature > 1.5
    assert 36 <= ones < 40
    assert min(best) < 0.95 and max(best) > 1.05


@pytest.mark.parametrize("kind", ["laplace", "sngp"])
def test_temperature_undoes_what_was_done_to_the_logits(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that a strong prior keeps far too small are served larger."""
    module = {"laplace": laplace, "sngp": sngp_fit}[kind]
    monkeypatch.setattr(softmax, "PRECISIONS", (1e3,))
    monkeypatch.setattr(module, "PRECISIONS", (1e6,))
    head = fit(kind)
    assert head.record["temperature"] < 0.6
    assert head.record["val_nll"] < 0.8 * head.record["map_val_nll"]
    z, labels = images(150, 6, 3, seed=1)
    served = posterior.nll(head(z).probabilities.log(), labels).mean().item()
    assert served == pytest.approx(head.record["val_nll"], abs=1e-4)


def test_a_column_that_varies_by_rounding_alone_is_constant() -> None:
    z = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    z[:, 1] = 1e7 + torch.arange(200) % 2
    scale = fit_standardisation(z).inverse_scale
    assert scale[1] == scale[0]


def test_random_features_approximate_the_rbf_kernel() -> None:
    random = torch.Generator().manual_seed(0)
    phi = torch.randn(20, 3, generator=random)
    omega, phases = torch.randn(3, 20000, generator=random), 2 * math.pi * torch.rand(20000, generator=random)
    psi = sngp.random_features(phi, omega / 1.5, phases)
    expected = torch.exp(-torch.cdist(phi, phi).square() / (2 * 1.5**2))
    torch.testing.assert_close(psi @ psi.T / 20000, expected, rtol=0, atol=0.05)


def test_sngp_variance_is_the_dense_posterior() -> None:
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
        assert output.epistemic[i].item() == pytest.approx(variance, rel=1e-2)
        expected = naive.probit_probabilities(logits[i], torch.tensor(variance))
        torch.testing.assert_close(output.probabilities[i].double(), expected, rtol=1e-3, atol=1e-4)


def test_sngp_takes_a_shorter_length_scale_for_classes_in_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(softmax, "PRECISIONS", (0.1,))
    z = torch.rand(200, 1, generator=torch.Generator().manual_seed(0))
    labels = (z[:, 0] * 6).long() % 2
    head = fit_head(z, labels, z, labels, num_classes=2, kind="sngp")
    median = torch.pdist(head.standardise(z)).median().item()
    assert head.record["length_scale"] == pytest.approx(0.5 * median, rel=1e-4)


def test_sngp_features_depend_on_the_seed_only() -> None:
    train, val = images(200, 4, 3), images(100, 4, 3, seed=1)
    one, same, other = (fit_head(*train, *val, num_classes=3, kind="sngp", seed=s) for s in (0, 0, 1))
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in one.state_dict().items())
    assert not torch.equal(one.state_dict()["phases"], other.state_dict()["phases"])


def test_duq_kernels() -> None:
    z, labels = images(200, 4, 3)
    head = fit("duq", n=200, dim=4)
    assert isinstance(head, duq.DuqHead)
    output = head(z[:20])
    for i, e in enumerate(head.standardise(z[:20]) @ head.embedding):
        k = naive.kernels(e, head.centroids, head.length_scale.item())
        powers = k.double() ** head.exponent.item()
        assert output.epistemic[i].item() == pytest.approx(1 - k.max().item(), abs=1e-4)
        expected = (powers / powers.sum()).float()
        torch.testing.assert_close(output.probabilities[i], expected, rtol=1e-3, atol=1e-4)
    loss = duq_fit.kernel_loss(torch.tensor([[0.9, 0.2]]).log(), torch.tensor([0]))
    assert loss == pytest.approx(-math.log(0.9) - math.log(0.8))
    embedded = head.standardise(z) @ head.embedding
    within = torch.stack([torch.cov(embedded[labels == k].T) for k in range(3)]).mean(0)
    torch.testing.assert_close(within, torch.eye(4), rtol=0, atol=0.05)


@pytest.mark.parametrize(("n", "shrunk"), [(62, False), (61, True)])
def test_duq_shrinks_the_covariance_of_fewer_than_ten_rows_a_column(n: int, shrunk: bool) -> None:
    z, labels = images(n, 6, 2)
    head = fit_head(z, labels, z, labels, num_classes=2, kind="duq")
    assert (head.record["shrinkage"] > 0) == shrunk


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_every_head(kind: str, scale: float) -> None:
    z, labels = images(400, 6, 3, seed=5, scale=scale)
    head = fit(kind, scale=scale)
    output = head(z)
    assert output.probabilities.shape == (400, 3)
    torch.testing.assert_close(output.probabilities.sum(1), torch.ones(400))
    assert (output.probabilities.argmax(1) == labels).float().mean() > 0.8
    assert head.record["val_nll"] < 0.6
    noise = 20 * scale * torch.randn(400, 6, generator=torch.Generator().manual_seed(2))
    assert head(noise).epistemic.mean() > output.epistemic.mean()
    aleatoric, epistemic = head.split(z)
    torch.testing.assert_close(epistemic, output.epistemic)
    assert ((aleatoric >= -1e-6) & (aleatoric <= math.log(3) + 1e-5)).all()
    assert head.epistemic_unit


@pytest.mark.parametrize("kind", KINDS)
def test_degenerate_features(kind: str) -> None:
    z, labels = images(30, 50, 3)  # fewer rows than columns
    z[:, 3], z[:, 4] = 1e4, z[:, 5]  # a constant and a repeated column
    z[labels == 2] = z[2].clone()  # identical images
    head = fit_head(z, labels, z, labels, num_classes=3, kind=kind)
    assert all(part.isfinite().all() for part in head(z))
    assert (head(z).probabilities.argmax(1) == labels).float().mean() > 0.9
    moved = z.clone()
    moved[:, 3] += 50.0
    if kind != "sngp":  # (a random Fourier process knows no more than "elsewhere")
        assert head(moved).epistemic.mean() > head(z).epistemic.mean()


@pytest.mark.parametrize("kind", KINDS)
def test_restored_from_config_and_tensors(kind: str) -> None:
    z, _ = images(20, 6, 3)
    head = fit(kind)
    again = restore_head(json.loads(json.dumps(head.config())), head.state_dict())
    assert type(again) is type(head)
    assert again.config() == head.config()
    assert all(torch.equal(one, other) for one, other in zip(head(z), again(z), strict=True))
    state = dict(head.state_dict())
    state.popitem()
    with pytest.raises(BundleError, match="expected tensors"):
        restore_head(head.config(), state)
    assert fit(kind).config() == head.config()


def test_refusals_say_what_to_do() -> None:
    train, val = images(30, 4, 3), images(20, 4, 3, seed=1)
    with pytest.raises(UsageError, match=r"expected a head of .*, got 'mlp'"):
        fit_head(*train, *val, num_classes=3, kind="mlp")
    with pytest.raises(FitError, match=r"at least 1 image of every class, got '3' \(0\)"):
        fit_head(*train, *val, num_classes=4)
    with pytest.raises(FitError, match="all are equal"):
        fit_head(torch.full((30, 4), 0.1), train[1], *val, num_classes=3)
    with pytest.raises(FitError, match="NaN"):
        fit_head(*train, val[0] * math.nan, val[1], num_classes=3)


def test_laplace_torch_is_imported_only_to_fit() -> None:
    code = "import sys, psc_core.heads; print('laplace' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
