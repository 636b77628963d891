from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.cluster.hierarchy import fcluster, linkage
from sklearn.metrics import silhouette_score

from psc_core import linalg
from psc_core.data.dataset import ImageDataset, TensorSource, label_images
from psc_core.density import (
    DENSITIES,
    Density,
    Examples,
    class_covariances,
    class_proportions,
    class_values,
    draw_images,
    fit_density,
)
from psc_core.density import extend_density as extend
from psc_core.errors import UsageError
from psc_core.images.preprocess import PRESETS
from psc_core.learnt import FEWEST, STORED, cluster, fit_reviewed, moments_of, store_images, with_enough
from tests.reference import reviewed as naive

NAMES = ("none_of_the_classes", "hedgehog", "drone")


def fitted(kind: str, *, seed: int = 0, classes: int = 3, dim: int = 6) -> tuple[Density, torch.Tensor]:
    """A density of correlated features, and features of images that are of no class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(120) % classes
    turn, centres = torch.randn(dim, dim, generator=generator), 3 * torch.randn(classes, dim, generator=generator)
    features = torch.randn(120, dim, generator=generator) @ turn + centres[labels] + 5
    density = fit_density(Examples(features, labels, classes), kind=kind)
    return density, torch.randn(40, dim, generator=generator) @ turn + 4 * torch.randn(dim, generator=generator)


def test_what_looks_alike_is_a_cluster() -> None:
    density, _ = fitted("tied")
    generator = torch.Generator().manual_seed(2)
    kept = density.basis.shape[1]
    centres = 9 * torch.randn(2, kept, generator=generator)
    which = torch.tensor([0, 1, 1, 1] * 10)
    w = centres[which] + torch.randn(40, kept, generator=generator)
    assert torch.equal(cluster(density, w), 1 - which)  # The largest comes first.
    assert cluster(density, w[:19]).unique().tolist() == [0] and len(cluster(density, w[:0])) == 0
    assert cluster(density, w[:1].expand(30, kept)).unique().tolist() == [0]


@pytest.mark.parametrize("seed", [10, 34, 80])
def test_number_of_clusters_is_that_of_the_largest_silhouette(seed: int) -> None:
    """Of scikit-learn's, where an image that is a cluster alone counts 0."""
    density, _ = fitted("tied")
    w = torch.randn(20 + 10 * (seed % 3), density.basis.shape[1], generator=torch.Generator().manual_seed(seed))
    w[0] *= 3
    features = w.double() @ linalg.inverse_root(moments_of(density).metric).root
    tree, counts = linkage(features.numpy(), "ward"), range(2, len(w) // 10 + 1)
    best = max(counts, key=lambda count: silhouette_score(features, fcluster(tree, count, "maxclust")))
    assert len(cluster(density, w).unique()) == best


@pytest.mark.parametrize("kind", DENSITIES)
def test_directions_are_those_of_the_twin(kind: str) -> None:
    density, unknown = fitted(kind)
    w = density.coordinates(unknown)
    kinds = torch.tensor([1, 2]).repeat(20)
    reviewed = fit_reviewed(density, w, kinds, NAMES, [f"2026-11-{10 + at % 3}" for at in range(40)])
    means, covariances = density.get_buffer("centres").numpy(), [each.numpy() for each in class_covariances(density)]
    for at, name in enumerate(NAMES[1:]):
        of_kind = w[kinds == at + 1].numpy()
        proportions = class_proportions(density).tolist()
        expected = naive.direction(density.basis.numpy(), proportions, list(means), covariances, of_kind)
        np.testing.assert_allclose(reviewed.directions[:, at].numpy(), expected, rtol=1e-6, atol=1e-9)
        assert (reviewed.kinds[at].name, reviewed.kinds[at].images) == (name, 20)
    assert [each.day for each in reviewed.kinds] == ["2026-11-10", "2026-11-11"]
    assert reviewed(w[:1]).shape == (1, 2)
    assert torch.equal(reviewed(w)[3], reviewed(w[3:4])[0])  # whatever batch an image is in


@pytest.mark.parametrize("kind", ["pooled++", "tied"])
def test_values_of_the_classes_are_those_of_images_drawn_from_them(kind: str) -> None:
    density, unknown = fitted(kind, dim=5)
    reviewed = fit_reviewed(density, density.coordinates(unknown), torch.arange(40) % 2, NAMES)
    values = class_values(draw_images(density, 20_000), reviewed.largest)
    assert torch.equal(values, class_values(draw_images(density, 20_000), reviewed.largest))
    drawn = []
    for k, (share, covariance) in enumerate(zip(class_proportions(density), class_covariances(density), strict=True)):
        root, count = torch.linalg.cholesky(covariance), round(20_000 * float(share))
        noise = torch.randn(count, len(root), generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        drawn.append(reviewed(density.get_buffer("centres")[k] + noise @ root.T).amax(1))
    points = torch.linspace(0.05, 0.95, 19)
    spread = torch.quantile(torch.cat(drawn), points)
    torch.testing.assert_close(torch.quantile(values, points), spread, rtol=0.05, atol=0.05)


def test_one_kind_of_value_has_mean_zero_and_deviation_one() -> None:
    density, unknown = fitted("tied")
    reviewed = fit_reviewed(density, density.coordinates(unknown), torch.zeros(40, dtype=torch.int64), NAMES)
    values = class_values(draw_images(density, 20_000), reviewed.largest)
    assert float(values.mean()) == pytest.approx(0, abs=0.03) and float(values.std()) == pytest.approx(1, abs=0.03)
    assert float(reviewed(density.coordinates(unknown)).mean()) > 1
    like = 4 + 3 * torch.randn(4000, generator=torch.Generator().manual_seed(0))
    moved = class_values(draw_images(density, 20_000), reviewed.largest, like)
    assert float(moved.median()) == pytest.approx(float(like.median()), abs=1e-3)
    deviations = [float((each - each.median()).abs().mean()) for each in (moved, like)]
    assert deviations[0] == pytest.approx(deviations[1], rel=1e-3)
    equal = torch.full((9,), 7.0)  # They say nothing of a deviation.
    same = class_values(draw_images(density, 100), reviewed.largest, equal)
    assert float(same.median()) == 7 and float(same.std()) == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("kind", ["gda++", "rmd", "tied"])
def test_an_extended_density_moves_the_check(kind: str) -> None:
    density, unknown = fitted(kind)
    generator = torch.Generator().manual_seed(1)
    more, labels = torch.randn(30, 6, generator=generator) + 5, torch.arange(30) % 3
    reviewed = fit_reviewed(density, density.coordinates(unknown), torch.arange(40) % 2, NAMES)
    found = extend(density, more, labels, examples=120, times=2)
    before, after = reviewed(density.coordinates(unknown)), reviewed.moved(found)(found.density.coordinates(unknown))
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


@settings(deadline=None)
@given(
    counts=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    scale=st.sampled_from([1e-6, 1.0, 1e4]),
    constant=st.booleans(),
)
def test_degenerate_images_give_finite_values(counts: list[int], scale: float, constant: bool) -> None:
    density, unknown = fitted("pooled++", seed=3)
    features = unknown[:1].repeat(sum(counts), 1) if constant else unknown.repeat(3, 1)[: sum(counts)] * scale
    kinds = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    reviewed = fit_reviewed(density, density.coordinates(features), kinds, NAMES)
    assert reviewed(density.coordinates(features)).isfinite().all() and len(reviewed.kinds) == len(counts)
    assert class_values(draw_images(density, 50), reviewed.largest).isfinite().all()


def images_of_kinds(counts: list[int]) -> ImageDataset:
    labels = torch.arange(3).repeat_interleave(torch.tensor(counts))
    pixels = np.arange(sum(counts), dtype=np.uint8)[:, None, None, None].repeat(28, 2).repeat(28, 3)
    return label_images("unknown", NAMES, TensorSource(pixels), labels, PRESETS["mnist"])


def test_kinds_of_few_images_are_one() -> None:
    counted = with_enough(images_of_kinds([3, 9, FEWEST])).first_labels().bincount().tolist()
    assert counted == [12, 0, FEWEST]
    with pytest.raises(UsageError, match=r"8 images are reviewed .* the check needs 10; review 2 more"):
        with_enough(images_of_kinds([3, 5, 0]))


def test_pictures_of_each_kind_are_stored() -> None:
    density, _ = fitted("tied")
    images = images_of_kinds([2, 0, 20])
    w = torch.randn(22, density.basis.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    reviewed = store_images(fit_reviewed(density, w, images.first_labels(), NAMES), images, w)
    assert reviewed.stored_images is not None
    tensors = reviewed.stored_images.tensors()
    assert tensors["labels"].tolist() == [0] * 2 + [1] * STORED  # positions among the kinds that there are
    assert tensors["images"].tolist() == [*range(2), *range(2, 2 + STORED)]
    torch.testing.assert_close(reviewed.stored_images(w[5:6]).argmin(), torch.tensor(5))
    assert tensors["pixels"][5].unique().tolist() == [5]
    moved = reviewed.moved(extend(density, torch.randn(6, 6) + 5, torch.arange(6) % 3, examples=120))
    assert moved.stored_images is not None and len(moved.stored_images) == 14
