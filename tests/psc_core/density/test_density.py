from __future__ import annotations

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from psc_core.density import DENSITIES, Density, gaussian, restore_density
from psc_core.density.fit import density as fitting
from psc_core.density.fit import pca
from psc_core.density.fit.density import fit_density
from psc_core.errors import BundleError, FitError, UsageError
from psc_core.metrics import ranking
from tests.reference import density as naive

KINDS = sorted(DENSITIES)
SCALES = st.sampled_from([1e-6, 1.0, 1e6])
SEEDS = st.integers(0, 2**16)


def images(
    n: int, dim: int, classes: int, *, seed: int = 0, scale: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Classes with means, and covariances that differ, each with the same number of rows."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    means = 2 * torch.randn(classes, dim, generator=random)
    spreads = 0.3 + torch.rand(classes, dim, generator=random)
    mixing = torch.randn(dim, dim, generator=random) / math.sqrt(dim)
    z = (means[labels] + spreads[labels] * torch.randn(n, dim, generator=random)) @ mixing
    return scale * (z + offset), labels


def assert_close_to_twin(model: Density, train: Tensor, labels: Tensor, z: Tensor, kept: int | None) -> None:
    """The bound we state for float32 serving of a float64 fit: 10⁻⁴ of the value, and 10⁻³ nats."""
    expected = naive.class_log_joint(train, labels, z, kind=model.kind, pca=kept)
    got = model(z)
    torch.testing.assert_close(got.class_log_joint.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got.log_density.double(), expected.logsumexp(1), rtol=1e-4, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(2, 4), SEEDS, SCALES)
def test_density_is_the_definition_in_float64(kind: str, dim: int, classes: int, seed: int, scale: float) -> None:
    dim = max(dim, 2) if DENSITIES[kind].unit_length else dim
    z, labels = images(80 * classes, dim, classes, seed=seed, scale=scale)
    model = fit_density(z, labels, num_classes=classes, kind=kind)
    if model.record["lifted_eigenvalues"] == 0:
        far = torch.cat([z[:10], 3 * z[10:20], z.new_zeros(1, dim) + 0.1 * scale])
        assert_close_to_twin(model, z, labels, far, None)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(KINDS), st.integers(3, 12), st.integers(2, 5), st.integers(4, 9), SEEDS, SCALES)
def test_few_images_are_shrunk_as_defined(
    kind: str, dim: int, classes: int, per_class: int, seed: int, scale: float
) -> None:
    z, labels = images(per_class * classes, dim, classes, seed=seed, scale=scale)
    model = fit_density(z, labels, num_classes=classes, kind=kind)
    assert model.record["lifted_eigenvalues"] == 0
    assert_close_to_twin(model, z, labels, z, None)


@pytest.mark.parametrize("kind", ["gda", "gda++", "pooled++"])
def test_many_classes_of_few_images_keep_the_directions_that_tell(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(500) % 100
    means = torch.randn(100, 48, generator=random)
    z = means[labels] + 0.5 * torch.randn(500, 48, generator=random)
    inside = means[labels] + 0.5 * torch.randn(500, 48, generator=random)
    outside = torch.randn(500, 48, generator=random)
    model = fit_density(z, labels, num_classes=100, kind=kind)
    found = ranking.auroc(-model(inside).log_density, -model(outside).log_density)
    assert found > 0.99  # with as many components as a class has images beyond one, 4, it is 0.51 to 0.56


def test_enough_images_are_the_papers_sample_covariances() -> None:
    z, labels = images(2000, 5, 4)
    record = fit_density(z, labels, num_classes=4, pca=5).record
    assert record["shrunk_classes"] == record["pooled_shrinkage"] == record["lifted_eigenvalues"] == 0


def test_density_integrates_to_one() -> None:
    z, labels = images(600, 2, 3, seed=1)
    for kind in ("gda", "tied"):
        model = fit_density(z, labels, num_classes=3, kind=kind, pca=2)
        ticks = torch.linspace(-12, 12, 400)
        grid = torch.cartesian_prod(ticks, ticks)
        cell = (ticks[1] - ticks[0]).item() ** 2
        assert model(grid).log_density.exp().sum().item() * cell == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_z_moves_the_log_density_by_the_change_of_variables(kind: str) -> None:
    z, labels = images(400, 6, 3)
    small = fit_density(z, labels, num_classes=3, kind=kind, pca=4)(z).log_density
    large = fit_density(1024 * z, labels, num_classes=3, kind=kind, pca=4)(1024 * z).log_density
    shift = 0.0 if kind in ("rmd", "gda++", "pooled++") else 4 * math.log(1024)
    torch.testing.assert_close(large + shift, small, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_out_of_distribution_scores_lower(kind: str) -> None:
    z, labels = images(900, 8, 3, offset=0.5)
    model = fit_density(z, labels, num_classes=3, kind=kind)
    noise = 4 * torch.randn(200, 8, generator=torch.Generator().manual_seed(5))
    assert model(noise).log_density.median() < model(z).log_density.quantile(0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_explanation_is_the_distance_to_the_nearest_class(kind: str) -> None:
    z, labels = images(600, 7, 3)
    model = fit_density(z, labels, num_classes=3, kind=kind)
    distances, nearest, deviation = model.explain(z)
    assert distances.shape == (600, 3)
    assert (nearest == distances.argmin(1)).all()
    assert (nearest == labels).float().mean() > 0.9
    torch.testing.assert_close(deviation.norm(dim=1), distances.amin(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_constant_and_repeated_columns_change_nothing(kind: str) -> None:
    z, labels = images(500, 5, 3)
    if DENSITIES[kind].unit_length:  # a column more is another length; repeat instead of adding a constant
        padded = torch.cat([z, z], dim=1)
    else:
        padded = torch.cat([z, torch.full((500, 3), 7.7), z[:, :1] * 0], dim=1)
    plain = fit_density(z, labels, num_classes=3, kind=kind)
    model = fit_density(padded, labels, num_classes=3, kind=kind)
    assert model.record["components"] == plain.record["components"]
    torch.testing.assert_close(model(padded).log_density, plain(z).log_density, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_images_than_columns(kind: str) -> None:
    z, labels = images(12, 40, 3)
    model = fit_density(z, labels, num_classes=3, kind=kind)
    assert 1 <= model.record["components"] <= 11
    assert model(z).log_density.isfinite().all()
    with pytest.raises(FitError, match="expected 1 ≤ pca ≤ 11"):
        fit_density(z, labels, num_classes=3, kind=kind, pca=12)


def test_there_are_no_more_components_than_images_beyond_one_a_class() -> None:
    z = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    assert fit_density(z, torch.arange(20) % 10, num_classes=10, kind="tied").record["components"] == 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_identical_images_are_lifted_and_recorded(kind: str, scale: float) -> None:
    z, labels = images(60, 6, 3, scale=scale)
    z[labels == 1] = z[1].clone()
    model = fit_density(z, labels, num_classes=3, kind=kind)
    assert model(z).log_density.isfinite().all()
    if kind in ("gda", "gda++", "pooled++"):
        assert model.record["lifted_eigenvalues"] > 0
        assert 0 < model.record["largest_lift"] <= 1e-6 * (1 + 1e-9)
    collapsed = z[:3][labels]  # every class is one point
    model = fit_density(collapsed, labels, num_classes=3, kind=kind)
    assert model.record["components"] == 2
    assert model(collapsed).log_density.isfinite().all()
    assert (model.explain(collapsed).nearest_class == labels).all()


def test_repeated_rows_for_several_labels() -> None:
    z, labels = images(300, 4, 3)
    twice = fit_density(torch.cat([z, z]), torch.cat([labels, (labels + 1) % 3]), num_classes=3, pca=3)
    expected = naive.class_log_joint(torch.cat([z, z]), torch.cat([labels, (labels + 1) % 3]), z[:20],
                                     kind="gda", pca=3)  # fmt: skip
    torch.testing.assert_close(twice(z[:20]).class_log_joint.double(), expected, rtol=1e-4, atol=1e-3)


def test_large_batches_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(z, labels, num_classes=3)
    whole = model(z)
    monkeypatch.setattr(gaussian, "SERVE_ELEMENTS", 100)
    torch.testing.assert_close(model(z), whole)


def test_a_thousand_classes_in_bounded_memory() -> None:
    labels = torch.arange(6000) % 1000
    random = torch.Generator().manual_seed(0)
    z = torch.randn(1000, 48, generator=random)[labels] + 0.2 * torch.randn(6000, 48, generator=random)
    for kind in ("gda", "tied"):
        model = fit_density(z, labels, num_classes=1000, kind=kind)
        assert (model.explain(z[:500]).nearest_class == labels[:500]).float().mean() > 0.9
    assert fitting.WHITENER_ELEMENTS * 4 == 256 * 2**20


def test_number_of_components_rule() -> None:
    random = torch.Generator().manual_seed(0)
    deviations = torch.tensor([10.0, 5.0, 1.0, 0.1, 0.01])
    z = torch.randn(4000, 5, generator=random) * deviations
    assert len(pca.fit_pca(z, kept=None, limit=9).variances) == 2  # 100 + 25 of 126.01 is 99.2 %
    assert len(pca.fit_pca(z, kept=None, limit=1).variances) == 1
    full = pca.fit_pca(z, kept=5, limit=1)
    torch.testing.assert_close(full.variances.sqrt(), deviations.double(), rtol=0.05, atol=0)
    assert full.explained == pytest.approx(1.0)
    z[:, 4] *= 1e-5  # 10⁻⁸ of the largest deviation: rounding
    with pytest.raises(FitError, match="≤ 4"):
        pca.fit_pca(z, kept=5, limit=9)


def test_a_direction_that_hardly_varies_is_no_component() -> None:
    z = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(500) % 2
    fit_density(z * torch.tensor([1.0, 3e-5]), labels, num_classes=2, kind="tied", pca=2)
    with pytest.raises(FitError, match="≤ 1"):
        fit_density(z * torch.tensor([1.0, 3e-6]), labels, num_classes=2, kind="tied", pca=2)


@pytest.mark.parametrize("kind", KINDS)
def test_restored_from_config_and_tensors(kind: str) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(z, labels, num_classes=3, kind=kind)
    again = restore_density(json.loads(json.dumps(model.config())), model.state_dict())
    assert type(again) is type(model)
    assert again.config() == model.config()
    for one, other in zip(model(z), again(z), strict=True):
        assert torch.equal(one, other)
    assert all(tensor.dtype == torch.float32 for tensor in model.state_dict().values())
    twice = fit_density(z, labels, num_classes=3, kind=kind).state_dict()
    assert all(torch.equal(twice[name], tensor) for name, tensor in model.state_dict().items())


def test_restoring_refuses_what_does_not_fit() -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(z, labels, num_classes=3, kind="tied", pca=2)
    config, state = model.config(), dict(model.state_dict())
    with pytest.raises(BundleError, match="kind one of"):
        restore_density({**config, "kind": "pickle"}, state)
    with pytest.raises(BundleError, match="expected a config"):
        restore_density({"kind": "tied"}, state)
    with pytest.raises(BundleError, match="expected tensors"):
        restore_density(config, {"mean": state["mean"]})
    with pytest.raises(BundleError, match=r"tied\.centres with axes"):
        restore_density(config, {**state, "centres": state["centres"][:, :1]})
    with pytest.raises(BundleError, match="sizes"):
        restore_density(config, {**state, "centres": state["centres"][:2], "constants": state["constants"][:2]})
    with pytest.raises(BundleError, match="finite"):
        restore_density(config, {**state, "mean": state["mean"] * math.nan})


def test_refusals_say_what_to_do() -> None:
    z, labels = images(30, 4, 3)
    with pytest.raises(UsageError, match=r"expected a density of .*, got 'flow'"):
        fit_density(z, labels, num_classes=3, kind="flow")
    one = torch.cat([z[labels != 1], z[1:2]]), torch.cat([labels[labels != 1], labels[1:2]])
    with pytest.raises(FitError, match=r"at least 2 images of every class, got 'dog' \(1\)"):
        fit_density(*one, num_classes=3, class_names=("cat", "dog", "emu"))
    with pytest.raises(FitError, match=r"got '3' \(0\)"):
        fit_density(z, labels, num_classes=4)
    with pytest.raises(FitError, match=r"labels 0 … 1, got 0 … 2"):
        fit_density(z, labels, num_classes=2)
    with pytest.raises(FitError, match="NaN"):
        fit_density(z.where(z < z.max(), math.nan), labels, num_classes=3)
    with pytest.raises(FitError, match="all are equal"):
        fit_density(torch.full_like(z, 3.3), labels, num_classes=3)
    with pytest.raises(FitError, match="no features to fit"):
        fit_density(z[:0], labels[:0], num_classes=3)
    with pytest.raises(FitError, match="float features"):
        fit_density(z.long().float()[:, :0], labels, num_classes=3)
