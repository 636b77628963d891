"""Extended densities against a fit to all images, and against a twin that adds them one at a time."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from psc_core.density import (
    DENSITIES,
    EXAMPLES,
    ClasswiseDensity,
    Density,
    Examples,
    TiedDensity,
    can_extend,
    class_counts,
    extend_density,
    fit_density,
)
from psc_core.errors import FitError
from tests.psc_core.density.support import SEEDS, images
from tests.reference import density as naive

CLASSES, DIM = 3, 4

EXTENDED = [kind for kind, density in DENSITIES.items() if can_extend(density)]


@pytest.mark.parametrize("kind", EXTENDED)
def test_is_the_fit_to_all_images_where_components_stay_and_nothing_is_shrunk(kind: str) -> None:
    z, labels = images(1200, DIM, CLASSES, seed=1, offset=3.0)
    labels[torch.arange(1200) % 6 == 0] = 2  # Classes of different sizes.
    old, more = torch.arange(1200) < 700, torch.arange(1200) >= 700
    fitted = fit_density(Examples(z[old], labels[old], CLASSES), kind=kind, pca=DIM)
    assert class_counts(fitted, 700).tolist() == labels[old].bincount().tolist()
    found = extend_density(fitted, z[more], labels[more], examples=700)
    whole = fit_density(Examples(z, labels, CLASSES), kind=kind, pca=DIM)
    assert whole.record[EXAMPLES] == found.density.record[EXAMPLES] == 1200
    far = torch.cat([z[:20], 3 * z[:5], -z[5:10]])
    torch.testing.assert_close(found.density(far).class_log_joint, whole(far).class_log_joint, rtol=1e-4, atol=2e-3)
    torch.testing.assert_close(
        found.density.explain(far).class_distances, whole.explain(far).class_distances, rtol=1e-4, atol=1e-3
    )


@example("gda", [0, 1, 3], 0, False, 1)  # none of a class, one of a class
@example("tied", [0, 0, 1], 0, False, 1)
@example("rmd", [5, 0, 0], 0, True, 10)  # equal images
@given(st.sampled_from(EXTENDED), st.lists(st.integers(0, 6), min_size=3, max_size=3).filter(sum), SEEDS, st.booleans(),
       st.sampled_from([1, 2, 10]))  # fmt: skip
def test_adds_images_one_at_a_time(kind: str, sizes: list[int], seed: int, are_equal: bool, times: int) -> None:
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
    got, before = (each(z).class_log_joint.double() for each in (found, fitted))
    rise, twin = got - before, expected - nothing
    if fitted.kind == "rmd":  # Its background is the same for every class.
        background = torch.linalg.inv(state["background"].double() @ state["background"].double().T)
        mean = torch.zeros(1, len(background), dtype=torch.float64)
        all_before = naive.extended_log_joint([60], mean, background[None], False, w_more[:0], labels[:0], w)
        zeros = torch.zeros(len(w_more), dtype=torch.int64)
        twin -= naive.extended_log_joint([60], mean, background[None], False, w_more, zeros, w) - all_before
    scale = float(got.abs().max() + before.abs().max())
    torch.testing.assert_close(rise, twin, rtol=1e-3, atol=2e-3 + 2e-6 * scale)


def test_more_images_of_another_camera_become_likely() -> None:
    z, labels = images(2000, DIM, CLASSES)
    shifted = z + 4.0
    fitted = fit_density(Examples(z, labels, CLASSES))
    once, often = (
        extend_density(fitted, shifted[:100], labels[:100], examples=2000, times=times).density for times in (1, 20)
    )
    unseen = [density(shifted[100:]).log_density.mean() for density in (fitted, once, often)]
    assert unseen[0] < unseen[1] < unseen[2]


def test_refuses_what_cannot_be_features_or_counts() -> None:
    z, labels = images(60, DIM, CLASSES)
    fitted = fit_density(Examples(z, labels, CLASSES))
    with pytest.raises(FitError, match="expected finite features of the images that extend the density"):
        extend_density(fitted, z[:2] * torch.inf, labels[:2], examples=60)
    with pytest.raises(FitError, match="two labelled examples of each of 3 classes, got 5; fit it again"):
        extend_density(fitted, z[:2], labels[:2], examples=5)


class SpreadDensity(TiedDensity):
    """A density that somebody added, with a tensor that no moments give."""

    kind = "spread"
    layout: ClassVar = {**TiedDensity.layout, "spreads": ("classes",)}


def test_refuses_a_density_with_tensors_of_its_own() -> None:
    z, labels = images(60, DIM, CLASSES)
    tied = fit_density(Examples(z, labels, CLASSES), kind="tied")
    density = SpreadDensity({**tied.state_dict(), "spreads": torch.ones(CLASSES)}, record={})
    with pytest.raises(FitError, match="a density 'spread' has tensors that more images cannot extend; fit it again"):
        extend_density(density, z[:2], labels[:2], examples=60)
