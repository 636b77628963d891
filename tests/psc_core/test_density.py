"""Fitted and extended densities against their float64 twins, and on degenerate features."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal
from torch.nn import functional

from psc_core import density, metrics
from psc_core.density import (
    BACKGROUND_LIMIT,
    DENSITIES,
    EXAMPLES,
    TIED_WEIGHTS,
    ClassMoments,
    ClasswiseDensity,
    Density,
    Examples,
    TiedDensity,
    blend,
    can_extend,
    choose_tied_weight,
    class_counts,
    extend_density,
    fit_density,
    fit_pca,
    log_likelihoods,
    restore_density,
)
from psc_core.errors import BundleError, FitError
from tests.reference import density as naive

KINDS = sorted(DENSITIES)
SCALES = st.sampled_from([1e-6, 1.0, 1e6])
SEEDS = st.integers(0, 2**16)


def images(
    n: int, dim: int, classes: int, *, seed: int = 0, scale: float = 1.0, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Features and labels: classes with means and covariances of their own, each with as many images."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % classes
    means = 2 * torch.randn(classes, dim, generator=random)
    spreads = 0.3 + torch.rand(classes, dim, generator=random)
    mixing = torch.randn(dim, dim, generator=random) / math.sqrt(dim)
    z = (means[labels] + spreads[labels] * torch.randn(n, dim, generator=random)) @ mixing
    return scale * (z + offset), labels


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(kind: str) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    again = restore_density(json.loads(json.dumps(model.config())), model.state_dict())
    assert type(again) is type(model)
    assert again.config() == model.config()
    for one, other in zip(model(z), again(z), strict=True):
        assert torch.equal(one, other)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.float64 if name in ("mean", "basis", "centres") else torch.float32)
    twice = fit_density(Examples(z, labels, 3), kind=kind).state_dict()
    assert all(torch.equal(twice[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"centres": None}, "expected tensors"),
        ({"centres": lambda t: t[:, :1]}, "axes"),
        ({"centres": lambda t: t[:2], "constants": lambda t: t[:2]}, "sizes"),
        ({"mean": Tensor.float}, r"torch\.float64 for tied\.mean"),
        ({"constants": Tensor.double}, r"torch\.float32 for tied\.constants"),
        ({"mean": lambda t: t * math.nan}, "finite"),
    ],
)
def test_rejects_other_tensors(changes: dict[str, Callable[[Tensor], Tensor] | None], message: str) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3), kind="tied", pca=2)
    state = dict(model.state_dict())
    for name, change in changes.items():
        tensor = state.pop(name)
        if change is not None:
            state[name] = change(tensor)
    with pytest.raises(BundleError, match=message):
        restore_density(model.config(), state)


def test_rejects_an_unknown_kind() -> None:
    with pytest.raises(BundleError, match="kind"):
        restore_density({"kind": "pickle", "sizes": {}}, {})


@pytest.mark.parametrize("kind", KINDS)
def test_explanation_matches_distances(kind: str) -> None:
    z, labels = images(600, 7, 3)
    model = fit_density(Examples(z, labels, 3), kind=kind)
    distances, nearest, deviation = model.explain(z)
    assert distances.shape == (600, 3)
    assert (nearest == distances.argmin(1)).all()
    assert (nearest == labels).float().mean() > 0.9
    torch.testing.assert_close(deviation.norm(dim=1), distances.amin(1), rtol=1e-3, atol=1e-4)


def test_splits_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    z, labels = images(300, 4, 3)
    model = fit_density(Examples(z, labels, 3))
    whole = model(z)
    monkeypatch.setattr(density, "SERVE_ELEMENTS", 100)
    torch.testing.assert_close(model(z), whole)


def test_number_of_components() -> None:
    random = torch.Generator().manual_seed(0)
    deviations = torch.tensor([10.0, 5.0, 1.0, 0.1, 0.01])
    z = torch.randn(4000, 5, generator=random) * deviations
    assert len(fit_pca(z, kept=None, limit=9).variances) == 2  # 100 + 25 of 126.01 is 99.2 %
    assert len(fit_pca(z, kept=None, limit=1).variances) == 1
    full = fit_pca(z, kept=5, limit=1)
    torch.testing.assert_close(full.variances.sqrt(), deviations.double(), rtol=0.05, atol=0)
    assert full.explained == pytest.approx(1.0)
    z[:, 4] *= 1e-5  # 10⁻⁸ of the largest deviation: rounding
    with pytest.raises(FitError, match="≤ 4"):
        fit_pca(z, kept=5, limit=9)


def test_rounding_is_no_component() -> None:
    z = torch.randn(500, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(500) % 2
    fit_density(Examples(z * torch.tensor([1.0, 3e-5]), labels, 2), kind="tied", pca=2)
    with pytest.raises(FitError, match="≤ 1"):
        fit_density(Examples(z * torch.tensor([1.0, 3e-6]), labels, 2), kind="tied", pca=2)


@pytest.mark.parametrize("kind", ["gda", "mahalanobis++"])
def test_features_that_differ_by_rounding_have_no_density(kind: str) -> None:
    """As they are, and of unit length."""
    random = torch.Generator().manual_seed(0)
    z = 0.5 * torch.randn(1, 64, generator=random).expand(200, 64)
    z = z + torch.randint(-4, 5, (200, 64), generator=random) * torch.finfo(torch.float32).eps * z.abs()
    with pytest.raises(FitError, match="equal"):
        fit_density(Examples(z, torch.arange(200) % 2, 2), kind=kind)


def moments(images: Tensor) -> ClassMoments:
    return ClassMoments(images.mean(0), torch.cov(images.T).reshape(images.shape[1], images.shape[1]))


@given(st.integers(1, 6), st.integers(1, 9), st.integers(8, 40), SEEDS)
def test_log_likelihoods_are_those_of_normal_distributions(dim: int, held_out: int, n: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    own = moments(torch.randn(n, dim, generator=random).double())
    unseen = torch.randn(held_out, dim, generator=random).double()
    for tied, got in zip(TIED_WEIGHTS, log_likelihoods(own, unseen).tolist(), strict=True):
        normal = MultivariateNormal(own.mean, (1 - tied) * own.covariance + tied * torch.eye(dim).double())
        constant = -0.5 * dim * torch.log(torch.tensor(2 * torch.pi)).double()
        expected = float((normal.log_prob(unseen) - constant).sum())
        assert abs(got - expected) <= 1e-6 * max(1.0, abs(expected))


def test_classes_alike_are_tied_and_others_are_not() -> None:
    random = torch.Generator().manual_seed(0)
    root = torch.diag(torch.tensor([0.2, 1.0, 3.0])).double()

    def chosen(count: int, root: Tensor) -> float:
        seen, unseen = (torch.randn(n, 3, generator=random).double() @ root for n in (count, 4000))
        return choose_tied_weight([(moments(seen), unseen, 1.0)] * 2)

    assert chosen(6, torch.eye(3).double()) >= 0.8
    assert chosen(4000, root) == 0.0
    assert torch.equal(blend(root, 1.0), torch.eye(3).double()) and torch.equal(blend(root, 0.0), root)


def test_nothing_held_out_of_a_class_leaves_the_choice_to_the_others() -> None:
    own = moments(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double())
    some = (own, torch.zeros(4, 3).double(), 1.0)
    assert choose_tied_weight([some]) == choose_tied_weight([some, (own, torch.zeros(0, 3).double(), 1.0)])


def test_a_small_class_takes_more_of_what_the_others_share() -> None:
    """Under one t for all, two thirds of its ordinary images would be unusual."""
    random, dim, many = torch.Generator().manual_seed(2), 48, 1500
    turns = [torch.linalg.qr(torch.randn(dim, dim, generator=random))[0] for _ in range(4)]
    means, deviations = 2.5 * torch.randn(4, dim, generator=random), torch.logspace(0.25, -0.25, dim)

    def draw(*counts: int) -> Examples:
        labels = torch.arange(4).repeat_interleave(torch.tensor(counts))
        noise = deviations * torch.randn(len(labels), dim, generator=random)
        rows = [row @ turns[k].T + means[k] for row, k in zip(noise, labels.tolist(), strict=True)]
        return Examples(torch.stack(rows) + 30, labels, 4)

    seen, held_out, known = draw(many, many, many, 40), draw(300, 300, 300, 10), draw(300, 300, 300, 300)
    values = fit_density(seen, kind="gda++", held_out=held_out)(known.features).log_density
    assert (values[900:] < values[:900].quantile(0.05)).double().mean() < 0.4


def test_few_images_a_class_share_a_covariance() -> None:
    """Likelihood of images that nothing was fitted to is higher than with covariances shrunk by formula."""
    z, labels = images(3 * 14, 12, 3, seed=1)
    apart, apart_labels = images(3 * 214, 12, 3, seed=1)
    held_out, test = slice(42, 342), slice(342, None)
    # ``images`` draws the same classes for one seed; the first images differ with their number, so none is shared.
    shrunk = fit_density(Examples(z, labels, 3), kind="gda++")
    unseen = Examples(apart[held_out], apart_labels[held_out], 3)
    tied = fit_density(Examples(z, labels, 3), kind="gda++", held_out=unseen)
    assert 0 < tied.record["tied_weight"] <= 1 and "tied_weight" not in shrunk.record
    joint = tied(apart[test]).log_density.mean() - shrunk(apart[test]).log_density.mean()
    assert joint > 0
    paper = fit_density(Examples(z, labels, 3), kind="gda", held_out=Examples(apart, apart_labels, 3))
    assert "tied_weight" not in paper.record


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


def test_an_odd_image_of_a_class_does_not_make_others_like_it_ordinary() -> None:
    z, labels = images(300, 6, 6)
    direction = torch.eye(6)[0]
    z[:, 0] = 0.01 * z[:, 0]
    z[0] = 40 * direction  # The class 0 varies more than twice as much in this direction as all images.
    model = fit_density(Examples(z, labels, 6), kind="pooled++")
    odd = functional.normalize(z[1:] + torch.linspace(2, 40, 299)[:, None] * direction)
    ordinary = model(z[1:]).log_density
    assert metrics.auroc(-ordinary, -model(odd).log_density) > 0.99
    assert metrics.auroc(-ordinary, -without_limit(model)(odd).log_density) < 0.5


def test_the_limit_leaves_held_out_images_as_they_are() -> None:
    z, labels = images(800, 6, 3)
    held_out = Examples(z[400:], labels[400:], 3)
    model = fit_density(Examples(z[:400], labels[:400], 3), kind="pooled++", held_out=held_out)
    before = model(z[400:]).log_density
    rise = without_limit(model)(z[400:]).log_density - before
    assert int((rise > 1e-4).sum()) == 4 and rise.abs().sort().values[:-4].max() < 1e-5  # one in a hundred


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


@pytest.mark.parametrize(("shown", "classes"), [(4, 10), (4, 4)])
def test_as_many_classes_as_images_leave_no_covariance(shown: int, classes: int) -> None:
    """Every image has every label, so that each class has four images."""
    z = torch.randn(shown, 3, generator=torch.Generator().manual_seed(0)).repeat_interleave(classes, dim=0)
    examples = Examples(z, torch.arange(classes).repeat(shown), classes, torch.arange(shown).repeat_interleave(classes))
    with pytest.raises(FitError, match=f"more images than classes, got 4 images of {classes} classes"):
        fit_density(examples, kind="tied")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda z, labels: (z[[0, 1, 2, 3, 5]], labels[[0, 1, 2, 3, 5]]), r"2 images of every class, got '1' \(1\)"),
        (lambda z, labels: (z, labels % 2), r"got '2' \(0\)"),
        (lambda z, labels: (z, labels + 1), "labels 0 … 2"),
        (lambda z, labels: (z.where(z < z.max(), math.nan), labels), "NaN"),
        (lambda z, labels: (torch.full_like(z, 3.3), labels), "equal"),
        (lambda z, labels: (z[:0], labels[:0]), "no features"),
        (lambda z, labels: (z[:, :0], labels), "float features"),
    ],
)
def test_rejects_unusable_features(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], message: str) -> None:
    with pytest.raises(FitError, match=message):
        fit_density(Examples(*change(*images(30, 4, 3)), 3))


CLASSES, DIM = 3, 4

EXTENDED = [kind for kind, density in DENSITIES.items() if can_extend(density)]


@pytest.mark.parametrize("kind", EXTENDED)
def test_extended_is_the_fit_to_all_images_where_components_stay(kind: str) -> None:
    z, labels = images(1200, DIM, CLASSES, seed=1, offset=3.0)
    labels[torch.arange(1200) % 6 == 0] = 2  # Classes of different sizes.
    old, more = torch.arange(1200) < 700, torch.arange(1200) >= 700
    fitted = fit_density(Examples(z[old], labels[old], CLASSES), kind=kind, pca=DIM)
    assert class_counts(fitted, 700).tolist() == labels[old].bincount().tolist()
    found = extend_density(fitted, z[more], labels[more], examples=700)
    whole = fit_density(Examples(z, labels, CLASSES), kind=kind, pca=DIM)
    assert whole.record[EXAMPLES] == found.density.record[EXAMPLES] == 1200
    far = torch.cat([z[:20], 3 * z[:5], -z[5:10]])
    assert_the_limit_stays(fitted, found.density)
    for each in (found.density, whole):
        without_limit(each)
    torch.testing.assert_close(found.density(far).class_log_joint, whole(far).class_log_joint, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(
        found.density.explain(far).class_distances, whole.explain(far).class_distances, rtol=1e-4, atol=1e-3
    )


@example("gda", [0, 1, 3], 0, False, 1)  # none of a class, one of a class
@example("tied", [0, 0, 1], 0, False, 1)
@example("rmd", [5, 0, 0], 0, True, 10)  # equal images
@given(st.sampled_from(EXTENDED), st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(sum), SEEDS, st.booleans(),
       st.sampled_from([1, 2, 10]))  # fmt: skip
def test_extending_adds_one_at_a_time(kind: str, sizes: list[int], seed: int, are_equal: bool, times: int) -> None:
    z, labels = images(60, DIM, CLASSES, seed=seed)
    more, _ = images(sum(sizes), DIM, CLASSES, seed=seed + 1, offset=1.0)
    more = more[:1].expand(len(more), -1) if are_equal else more
    own = torch.tensor(sizes).new_tensor([k for k, size in enumerate(sizes) for _ in range(size)])
    fitted = fit_density(Examples(z, labels, CLASSES), kind=kind)
    found = extend_density(fitted, more, own, examples=60, times=times)
    assert found.density.record[EXAMPLES] == 60 + times * len(own)
    assert_is_the_twin(fitted, found.density, more, own, z[:10], times)
    w = found.moved(fitted.coordinates(z))
    torch.testing.assert_close(w, found.density.coordinates(z), rtol=1e-6, atol=1e-6)


def assert_is_the_twin(
    fitted: Density, found: Density, more: torch.Tensor, labels: torch.Tensor, z: torch.Tensor, times: int
) -> None:
    """Compare differences from the first class, in which volumes cancel, and the rise of the density by extending."""
    own = [20] * CLASSES
    pooled = not isinstance(fitted, ClasswiseDensity)
    identity = torch.eye(fitted.basis.shape[1], dtype=torch.float64)[None]
    covariances = identity if pooled else torch.linalg.inv(fitted.whiteners.double().mT @ fitted.whiteners.double())
    state, centres = fitted.state_dict(), fitted.get_buffer("centres")
    w, w_more = fitted.coordinates(z), fitted.coordinates(more).repeat(times, 1)
    nothing = naive.extended_log_joint(own, centres, covariances, pooled, w_more[:0], labels[:0], w)
    expected = naive.extended_log_joint(own, centres, covariances, pooled, w_more, labels.repeat(times), w)
    assert_the_limit_stays(fitted, found)
    got, before = (without_limit(each)(z).class_log_joint.double() for each in (found, fitted))
    rise, twin = got - before, expected - nothing
    if weight := naive.BACKGROUND.get(fitted.kind):  # The background is the same for every class.
        background = torch.linalg.inv(state["background"].double() @ state["background"].double().T)
        mean = torch.zeros(1, len(background), dtype=torch.float64)
        all_before = naive.extended_log_joint([60], mean, background[None], False, w_more[:0], labels[:0], w)
        zeros = torch.zeros(len(w_more), dtype=torch.int64)
        all_after = naive.extended_log_joint([60], mean, background[None], False, w_more, zeros, w)
        twin -= weight * (all_after - all_before)
    scale = float(got.abs().max() + before.abs().max())
    torch.testing.assert_close(rise, twin, rtol=1e-3, atol=2e-3 + 2e-6 * scale)


def assert_the_limit_stays(fitted: Density, found: Density) -> None:
    assert all(
        torch.equal(tensor, found.state_dict()[name])
        for name, tensor in fitted.state_dict().items()
        if name == BACKGROUND_LIMIT
    )


def without_limit(of: Density) -> Density:
    """Let every squared distance from all images count in full."""
    if BACKGROUND_LIMIT in of.layout:
        of.get_buffer(BACKGROUND_LIMIT).fill_(torch.inf)
    return of


class SpreadDensity(TiedDensity):
    """A density that somebody added, with a tensor that no moments give."""

    kind = "spread"
    layout: ClassVar = {**TiedDensity.layout, "spreads": ("classes",)}


def test_refuses_to_extend_by_what_it_cannot() -> None:
    z, labels = images(60, DIM, CLASSES)
    tied = fit_density(Examples(z, labels, CLASSES), kind="tied")
    with pytest.raises(FitError, match="finite features"):
        extend_density(tied, z[:2] * torch.inf, labels[:2], examples=60)
    with pytest.raises(FitError, match="two labelled examples of each"):
        extend_density(tied, z[:2], labels[:2], examples=5)
    density = SpreadDensity({**tied.state_dict(), "spreads": torch.ones(CLASSES)}, record={})
    with pytest.raises(FitError, match="'spread'"):
        extend_density(density, z[:2], labels[:2], examples=60)


@pytest.mark.parametrize("kind", [kind for kind, family in DENSITIES.items() if family.unit_length])
def test_features_of_any_length_become_unit_vectors(kind: str) -> None:
    features = torch.randn(300, 6, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(6)[torch.arange(300) % 3]
    labels = torch.arange(300) % 3
    unit, short = (fit_density(Examples(scale * features, labels, 3), kind=kind) for scale in (1.0, 1e-30))
    expected = unit(features).log_density
    torch.testing.assert_close(short(1e-30 * features).log_density, expected, rtol=1e-4, atol=1e-4)
    assert unit(0 * features).log_density.isfinite().all()
