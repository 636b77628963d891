from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal

from psc_core.density import (
    TIED_WEIGHTS,
    ClassMoments,
    Examples,
    between,
    choose_tied_weight,
    fit_density,
    log_likelihoods,
)
from tests.psc_core.density.support import SEEDS, images


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
        return choose_tied_weight([(moments(seen), unseen), (moments(seen), unseen)])

    assert chosen(6, torch.eye(3).double()) >= 0.8
    assert chosen(4000, root) == 0.0
    assert torch.equal(between(root, 1.0), torch.eye(3).double()) and torch.equal(between(root, 0.0), root)


def test_nothing_held_out_of_a_class_leaves_the_choice_to_the_others() -> None:
    own = moments(torch.randn(50, 3, generator=torch.Generator().manual_seed(0)).double())
    some = (own, torch.zeros(4, 3).double())
    assert choose_tied_weight([some]) == choose_tied_weight([some, (own, torch.zeros(0, 3).double())])


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
