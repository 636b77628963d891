"""Fitted densities against their float64 twin, and on degenerate features."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from psc_core import metrics
from psc_core.density import DENSITIES, EXAMPLES, WHITENER_ELEMENTS, Density, Examples, fit_density
from psc_core.errors import FitError
from tests.psc_core.density.support import KINDS, SCALES, SEEDS, images
from tests.reference import density as naive


def assert_close_to_twin(model: Density, train: Tensor, labels: Tensor, z: Tensor, kept: int | None) -> None:
    """The bound we state for float32 serving of a float64 fit: 10⁻⁴ of the value, and 10⁻³ nats."""
    expected = naive.class_log_joint(train, labels, z, kind=model.kind, pca=kept)
    got = model(z)
    torch.testing.assert_close(got.class_log_joint.double(), expected, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(got.log_density.double(), expected.logsumexp(1), rtol=1e-4, atol=1e-3)


# Features near a circle through the origin: float32 loses the difference from a class mean.
@example("pooled++", 2, 2, 17153, 1e6)
@example("gda++", 2, 3, 18863, 1.0)
@example("pooled++", 2, 4, 47695, 1e6)
@given(st.sampled_from(KINDS), st.integers(1, 6), st.integers(2, 4), SEEDS, SCALES)
def test_density_is_the_definition_in_float64(kind: str, dim: int, classes: int, seed: int, scale: float) -> None:
    dim = max(dim, 2) if DENSITIES[kind].unit_length else dim
    z, labels = images(80 * classes, dim, classes, seed=seed, scale=scale)
    model = fit_density(Examples(z, labels, classes), kind=kind)
    if model.record["clamped_eigenvalues"] == 0:
        far = torch.cat([z[:10], 3 * z[10:20], z.new_zeros(1, dim) + 0.1 * scale])
        assert_close_to_twin(model, z, labels, far, None)


@given(st.sampled_from(KINDS), st.integers(3, 12), st.integers(2, 5), st.integers(4, 9), SEEDS, SCALES)
def test_shrinkage_is_the_definition_in_float64(
    kind: str, dim: int, classes: int, per_class: int, seed: int, scale: float
) -> None:
    z, labels = images(per_class * classes, dim, classes, seed=seed, scale=scale)
    model = fit_density(Examples(z, labels, classes), kind=kind)
    assert model.record["clamped_eigenvalues"] == 0
    assert_close_to_twin(model, z, labels, z, None)


@pytest.mark.parametrize("kind", ["gda", "gda++", "pooled++"])
def test_keeps_informative_directions_of_many_small_classes(kind: str) -> None:
    random = torch.Generator().manual_seed(0)
    labels = torch.arange(500) % 100
    means = torch.randn(100, 48, generator=random)
    z = means[labels] + 0.5 * torch.randn(500, 48, generator=random)
    inside = means[labels] + 0.5 * torch.randn(500, 48, generator=random)
    outside = torch.randn(500, 48, generator=random)
    model = fit_density(Examples(z, labels, 100), kind=kind)
    found = metrics.auroc(-model(inside).log_density, -model(outside).log_density)
    assert found > 0.99  # with as many components as a class has images beyond one, 4, it is 0.51 to 0.56


def test_enough_images_are_not_shrunk() -> None:
    z, labels = images(2000, 5, 4)
    record = fit_density(Examples(z, labels, 4), pca=5).record
    assert record["shrunk_classes"] == record["pooled_shrinkage"] == record["clamped_eigenvalues"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_ignores_constant_and_repeated_columns(kind: str) -> None:
    z, labels = images(500, 5, 3)
    if DENSITIES[kind].unit_length:  # a column more is another length; repeat instead of adding a constant
        padded = torch.cat([z, z], dim=1)
    else:
        padded = torch.cat([z, torch.full((500, 3), 7.7), z[:, :1] * 0], dim=1)
    plain = fit_density(Examples(z, labels, 3), kind=kind)
    model = fit_density(Examples(padded, labels, 3), kind=kind)
    assert model.record["components"] == plain.record["components"]
    torch.testing.assert_close(model(padded).log_density, plain(z).log_density, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_images_than_columns(kind: str) -> None:
    z, labels = images(12, 40, 3)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    assert 1 <= model.record["components"] <= 11
    assert model(z).log_density.isfinite().all()
    with pytest.raises(FitError, match="expected 1 ≤ pca ≤ 11"):
        fit_density(Examples(z, labels, 3), kind=kind, pca=12)


def test_components_are_at_most_images_minus_classes() -> None:
    z = torch.randn(20, 30, generator=torch.Generator().manual_seed(0))
    assert fit_density(Examples(z, torch.arange(20) % 10, 10), kind="tied").record["components"] == 10


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_clamps_identical_images(kind: str, scale: float) -> None:
    z, labels = images(60, 6, 3, scale=scale)
    z[labels == 1] = z[1].clone()
    model = fit_density(Examples(z, labels, 3), kind=kind)
    assert model(z).log_density.isfinite().all()
    if kind in ("gda", "gda++", "pooled++"):
        assert model.record["clamped_eigenvalues"] > 0
        assert 0 < model.record["largest_increase"] <= 1e-6 * (1 + 1e-9)
    collapsed = z[:3][labels]  # every class is one point
    model = fit_density(Examples(collapsed, labels, 3), kind=kind)
    assert model.record["components"] == 2
    assert model(collapsed).log_density.isfinite().all()
    assert (model.explain(collapsed).nearest_class == labels).all()


@given(st.sampled_from(KINDS), st.integers(2, 6), st.integers(2, 4), st.integers(4, 40), st.integers(2, 10), SEEDS)
def test_images_with_several_labels_count_once(
    kind: str, dim: int, classes: int, per_class: int, labels_each: int, seed: int
) -> None:
    """A third of the images have several labels, some of them twice."""
    z, labels = images(per_class * classes, dim, classes, seed=seed)
    random = torch.Generator().manual_seed(seed)
    ambiguous = torch.arange(0, len(z), 3)
    more = (labels[ambiguous, None] + torch.randint(0, 2, (len(ambiguous), labels_each), generator=random)) % classes
    shown = torch.cat([torch.arange(len(z)), ambiguous.repeat_interleave(labels_each)])
    examples = torch.cat([labels, more.flatten()])
    model = fit_density(Examples(z[shown], examples, classes, shown), kind=kind)
    expected = naive.class_log_joint(z[shown], examples, z, kind=kind, pca=None, images=shown)
    if model.record["clamped_eigenvalues"] == 0:
        torch.testing.assert_close(model(z).class_log_joint.double(), expected, rtol=1e-4, atol=1e-3)


def test_repeated_labels_add_no_images() -> None:
    """Ten copies of every label change neither the fit nor how far it is shrunk; without ``images`` they do both."""
    z, labels = images(60, 12, 3)
    once = fit_density(Examples(z, labels, 3))
    shown = torch.arange(60).repeat(10)
    copies = fit_density(Examples(z[shown], labels[shown], 3, shown))
    assert (once.record.pop(EXAMPLES), copies.record.pop(EXAMPLES)) == (60, 600)
    assert copies.record == pytest.approx(once.record, rel=1e-2)
    torch.testing.assert_close(copies(z).log_density, once(z).log_density, rtol=0.01, atol=0.1)
    assert fit_density(Examples(z[shown], labels[shown], 3)).record["shrunk_classes"] == 0
    with pytest.raises(FitError, match=r"at least 2 images of every class, got '1' \(1\)"):
        shown = torch.tensor([0, 1, 1, 2, 3])
        fit_density(Examples(z[shown], torch.tensor([0, 1, 1, 0, 0]), 2, shown))


def test_a_thousand_classes() -> None:
    labels = torch.arange(6000) % 1000
    random = torch.Generator().manual_seed(0)
    z = torch.randn(1000, 48, generator=random)[labels] + 0.2 * torch.randn(6000, 48, generator=random)
    for kind in ("gda", "tied"):
        model = fit_density(Examples(z, labels, 1000), kind=kind)
        assert (model.explain(z[:500]).nearest_class == labels[:500]).float().mean() > 0.9
    assert WHITENER_ELEMENTS * 4 == 256 * 2**20


def test_rejects_unusable_arguments() -> None:
    z, labels = images(30, 4, 3)
    one = torch.cat([z[labels != 1], z[1:2]]), torch.cat([labels[labels != 1], labels[1:2]])
    with pytest.raises(FitError, match=r"at least 2 images of every class, got 'dog' \(1\)"):
        fit_density(Examples(*one, 3, class_names=("cat", "dog", "emu")))
    with pytest.raises(FitError, match=r"got '3' \(0\)"):
        fit_density(Examples(z, labels, 4))
    with pytest.raises(FitError, match=r"labels 0 … 1, got 0 … 2"):
        fit_density(Examples(z, labels, 2))
    with pytest.raises(FitError, match="NaN"):
        fit_density(Examples(z.where(z < z.max(), math.nan), labels, 3))
    with pytest.raises(FitError, match="all are equal"):
        fit_density(Examples(torch.full_like(z, 3.3), labels, 3))
    with pytest.raises(FitError, match="no features to fit"):
        fit_density(Examples(z[:0], labels[:0], 3))
    with pytest.raises(FitError, match="float features"):
        fit_density(Examples(z.long().float()[:, :0], labels, 3))
