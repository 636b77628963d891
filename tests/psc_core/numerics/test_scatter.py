from __future__ import annotations

from threading import Barrier, Thread

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from psc_core import linalg as scatter
from psc_core.linalg import ClassScatter, class_pairs, distances_from, nc1_of, scatter_sums
from tests.reference import collapse as reference

SEEDS = st.integers(0, 2**31)


def draw(seed: int, images: int, dim: int, classes: int, labels_each: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Float32 features with class structure; every class has examples."""
    random = torch.Generator().manual_seed(seed)
    image_index = torch.arange(images).repeat_interleave(labels_each)
    labels = torch.arange(len(image_index)) % classes
    if labels_each > 1:  # a label may come more than once
        labels[classes:] = torch.randint(0, classes, (len(labels) - classes,), generator=random)
    means = torch.randn(classes, dim, generator=random)
    features = torch.randn(images, dim, generator=random) + means[labels[::labels_each]]
    return features, labels, image_index


def stream(
    sums: ClassScatter, features: Tensor, labels: Tensor, image_index: Tensor, batch: int, part: slice = slice(None)
) -> None:
    """Add batches of ``batch`` images; of the batches only ``part``."""
    for start in range(0, len(features), batch)[part]:
        chosen = (image_index >= start) & (image_index < start + batch)
        sums.add(features[start : start + batch], class_pairs(labels[chosen], image_index[chosen] - start))


def measure(
    features: Tensor, labels: Tensor, image_index: Tensor, classes: int, batch: int
) -> tuple[float, float, Tensor]:
    """Stream in batches of images: (NC1, total, means)."""
    sums = ClassScatter(classes, features.shape[1])
    stream(sums, features, labels, image_index, batch)
    assert torch.equal(sums.counts, torch.bincount(labels, minlength=classes).double())
    total = scatter_sums(sums)
    return nc1_of(total), float(total[:2].sum()), sums.means


def centroid_distances(features: Tensor, means: Tensor) -> Tensor:
    return distances_from(means.clone())(features)


@given(SEEDS, st.integers(1, 12), st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(1, 13))
def test_streaming_equals_the_loop(seed: int, more: int, dim: int, classes: int, labels_each: int, batch: int) -> None:
    images = classes + more
    features, labels, image_index = draw(seed, images, dim, classes, labels_each)
    nc1, total, means = measure(features, labels, image_index, classes, batch)
    examples = features.double().numpy()[image_index.numpy()]
    np.testing.assert_allclose(means.numpy(), reference.class_means(examples, labels.tolist(), classes), rtol=1e-12)
    within, wanted_total = reference.scatters(examples, labels.tolist(), classes)
    assert total == pytest.approx(wanted_total, rel=1e-10)
    assert nc1 == pytest.approx(within / wanted_total, rel=1e-10, abs=1e-15)


@given(SEEDS, st.integers(1, 12), st.integers(1, 7), st.integers(1, 4), st.integers(1, 3), st.integers(1, 13))
def test_by_column_equals_the_loop(seed: int, more: int, dim: int, classes: int, labels_each: int, batch: int) -> None:
    features, labels, image_index = draw(seed, classes + more, dim, classes, labels_each)
    sums = ClassScatter(classes, dim, by_column=True)
    stream(sums, features, labels, image_index, batch)
    for column in range(dim):
        examples = features[:, column : column + 1].double().numpy()[image_index.numpy()]
        within, total = reference.scatters(examples, labels.tolist(), classes)
        assert float(sums.within[column]) == pytest.approx(within, rel=1e-10, abs=1e-14)
        assert float(sums.total()[column]) == pytest.approx(total, rel=1e-10)
    mean, std = sums.mean_and_std()
    whole = features.double()[image_index]
    torch.testing.assert_close(mean, whole.mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(std, whole.std(0, correction=0), rtol=1e-10, atol=0)


@given(SEEDS, st.integers(2, 12), st.integers(1, 3))
def test_merged_processes_equal_one_process(seed: int, images: int, labels_each: int) -> None:
    """Two processes, one of which may have no rows of a class, or none at all."""
    features, labels, image_index = draw(seed, images, 5, 3, labels_each)
    whole = ClassScatter(3, 5, by_column=True)
    stream(whole, features, labels, image_index, 3)
    barrier, shared = Barrier(2), [torch.empty(0), torch.empty(0)]
    parts = [ClassScatter(3, 5, by_column=True) for _ in range(2)]

    def process(rank: int) -> None:
        def sum_(tensor: Tensor) -> Tensor:
            shared[rank] = tensor.clone()
            barrier.wait()
            total = shared[0] + shared[1]
            barrier.wait()
            return total

        stream(parts[rank], features, labels, image_index, 3, slice(rank, None, 2))
        parts[rank].all_reduce(sum_)

    threads = [Thread(target=process, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        assert torch.equal(part.counts, whole.counts)
        torch.testing.assert_close(part.means, whole.means, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(part.within, whole.within, rtol=1e-8, atol=1e-8)


def test_input_is_not_modified() -> None:
    features, labels, image_index = draw(0, 9, 4, 3)
    features = features.double()
    before = features.clone()
    measure(features, labels, image_index, 3, 4)
    assert torch.equal(features, before)
    centroid_distances(features, torch.zeros(3, 4, dtype=torch.float64))
    assert torch.equal(features, before)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("spread", [1.0, 1e-2])
def test_precision_survives_scale_offset_and_collapse(scale: float, offset: float, spread: float) -> None:
    """|mean|/std = 1e4, and clusters a hundred times tighter than they are apart."""
    random = torch.Generator().manual_seed(1)
    labels = torch.arange(400) % 4
    means = torch.randn(4, 30, generator=random)
    features = (scale * (offset + means[labels] + spread * torch.randn(400, 30, generator=random))).float()
    nc1, _, _ = measure(features, labels, torch.arange(400), 4, 64)
    assert nc1 == pytest.approx(reference.nc1(features.double().numpy(), labels.tolist(), 4), rel=1e-9)


@given(SEEDS, st.integers(1, 6), st.integers(1, 5), st.sampled_from([1e-6, 1.0, 1e6]), st.sampled_from([0.0, 1e4]))
def test_distances_rank_classes_like_norms(seed: int, dim: int, classes: int, scale: float, offset: float) -> None:
    features, labels, _ = draw(seed, 3 * classes, dim, classes)
    features = (scale * (features + offset)).float()
    means = torch.from_numpy(reference.class_means(features.double().numpy(), labels.tolist(), classes))
    found = centroid_distances(features, means)
    distances = (features.double()[:, None] - means).square().sum(2)
    gap = distances - (features.double() - means.mean(0)).square().sum(1, keepdim=True)
    torch.testing.assert_close(found, gap, rtol=1e-6, atol=1e-9 * float(distances.max()))
    nearest = distances.gather(1, found.argmin(1, keepdim=True)).squeeze(1)  # One of those at equal distance.
    torch.testing.assert_close(nearest, distances.amin(1), rtol=1e-6, atol=1e-9 * float(distances.max()))


def test_column_blocks_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    features, labels, image_index = draw(3, 20, 17, 3, 2)
    whole = measure(features, labels, image_index, 3, 7)
    distances = centroid_distances(features, whole[2])
    monkeypatch.setitem(scatter._BLOCK, "cpu", 32)
    blocks = measure(features, labels, image_index, 3, 7)
    assert blocks[:2] == pytest.approx(whole[:2], rel=1e-13)
    torch.testing.assert_close(centroid_distances(features, whole[2]), distances, rtol=1e-12, atol=1e-12)


def test_constant_features_have_collapsed() -> None:
    features = torch.full((30, 5), 0.1)
    assert measure(features, torch.arange(30) % 3, torch.arange(30), 3, 7)[0] == 0.0
    assert measure(torch.zeros(6, 2), torch.arange(6) % 3, torch.arange(6), 3, 4)[0] == 0.0


def test_nan_propagates() -> None:
    features = torch.ones(4, 2)
    features[1, 1] = torch.nan
    assert np.isnan(measure(features, torch.arange(4) % 2, torch.arange(4), 2, 4)[1])
