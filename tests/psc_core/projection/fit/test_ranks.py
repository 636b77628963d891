"""NC1 and NC4 of every size against a brute-force sweep, and the choice among them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.numerics.scatter import ClassScatter, class_pairs
from psc_core.projection import choose_ranks, nc1_prefixes, nearest_mean_hits
from psc_core.settings import FitSettings
from tests.reference import projection as reference


def settings(**changes: Any) -> FitSettings:
    return FitSettings(**{"minimum_dim": 1, **changes})


def sample(n: int, classes: int, c: int, d: int, seed: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.cat([torch.arange(classes), torch.randint(0, classes, (n,), generator=generator)])
    means = torch.randn(classes, c, d, generator=generator, dtype=torch.float64)
    z = means[labels] + torch.randn(len(labels), c, d, generator=generator, dtype=torch.float64) + 100.0
    return z * scale, labels


@given(
    n=st.integers(2, 30),
    classes=st.integers(2, 4),
    c=st.integers(1, 4),
    d=st.integers(1, 4),
    size=st.integers(1, 20),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-6, 1.0, 1e6]),
)
def test_prefix_sums_match_the_sweep(n: int, classes: int, c: int, d: int, size: int, seed: int, scale: float) -> None:
    z, labels = sample(n, classes, c, d, seed, scale)
    scatter = ClassScatter(classes, c * d, by_column=True)
    for part, own in zip(z.flatten(1).split(size), labels.split(size), strict=True):
        scatter.add(part, class_pairs(own, torch.arange(len(own))))
    nc1 = nc1_prefixes(scatter.within.view(c, d), scatter.total().view(c, d))
    means = scatter.means.view(classes, c, d)
    hits = nearest_mean_hits(z, means, labels)
    for i in range(1, c + 1):
        for j in range(1, d + 1):
            assert float(nc1[i - 1, j - 1]) == pytest.approx(reference.nc1(z[:, :i, :j], labels), rel=1e-8)
            expected = reference.nc4(z[:, :i, :j], labels, means[:, :i, :j])
            assert int(hits[i - 1, j - 1]) / len(z) == pytest.approx(expected)


def test_chooses_the_smallest_allowed_size() -> None:
    nc1 = torch.tensor([[0.1, 0.3, 0.3], [0.3, 0.3, 0.3]])
    nc4 = torch.tensor([[0.99, 0.80, 0.985], [0.80, 0.99, 0.99]])
    choice = choose_ranks(nc1, nc4, 0.99, settings(epsilon=0.2))
    assert choice == (1, 3, "")
    assert choose_ranks(nc1, nc4, 0.99, settings(epsilon=0.2, minimum_dim=4))[0] == 2


def test_cutoff_is_exclusive() -> None:
    nc1, nc4 = torch.tensor([[0.25, 0.3]]).double(), torch.tensor([[0.9, 0.9]])
    assert choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.25))[1] == 2


def test_warns_when_no_size_is_allowed() -> None:
    nc1, nc4 = torch.full((2, 2), 0.5), torch.tensor([[0.1, 0.2], [0.3, 0.4]])
    choice = choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2))
    assert choice[:2] == (2, 2)
    assert "took the best NC4" in choice[2]
    assert "gives up 0.500 of NC4: no size keeps more; choose another layer of the table by --layer" in choice[2]


def test_a_collapsed_size_is_taken_where_others_give_up_much() -> None:
    """Those of two spatial components have collapsed."""
    nc1, nc4 = torch.tensor([[0.5, 0.1], [0.5, 0.1]]), torch.tensor([[0.4, 0.89], [0.5, 0.9]])
    choice = choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2))
    assert choice[:2] == (1, 2)
    assert choice[2].endswith("took a collapsed one, NC1 > 0.2 gives up 0.400 of NC4")
    near = choose_ranks(nc1, torch.tensor([[0.4, 0.89], [0.86, 0.9]]), 0.9, settings(epsilon=0.2))
    assert near[:2] == (2, 1)


def test_the_warning_names_the_sizes_that_keep_more() -> None:
    nc1, nc4 = torch.tensor([[0.5, 0.1], [0.5, 0.1]]), torch.tensor([[0.4, 0.89], [0.5, 0.9]])
    named = choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2, d_proj=1))
    assert named[:2] == (2, 1)
    assert "gives up 0.400 of NC4: --c-proj 1 --d-proj 2 give up 0.010, with NC1 0.100" in named[2]


def test_keeps_fixed_sizes() -> None:
    nc1, nc4 = torch.full((3, 4), 0.5), torch.full((3, 4), 0.9)
    choice = choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2, c_proj=2, d_proj=3, minimum_dim=100))
    assert choice[:2] == (2, 3)
    assert choose_ranks(nc1, nc4, 0.9, settings(epsilon=0.2, c_proj=3))[0] == 3


GRID = st.sampled_from([0.1, 0.3, 0.5, 0.7, 0.9])


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_choice_matches_search(c: int, d: int, data: st.DataObject) -> None:
    nc1, nc4 = (
        torch.tensor(data.draw(st.lists(GRID, min_size=c * d, max_size=c * d)), dtype=torch.float64).view(c, d)
        for _ in range(2)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("psc_core.projection.NC4_LOSS", 0.1)
        patch.setattr("psc_core.projection.MUCH_NC4", 0.25)
        choice = choose_ranks(nc1, nc4, 0.7, settings(epsilon=0.3))
    assert choice[:2] == reference.smallest_size(nc1, nc4, 0.3, 0.7, 0.1, 0.25)


def test_minimum_dim_above_the_layer() -> None:
    flat = torch.full((1, 16), 0.9)
    choice = choose_ranks(flat, flat, 0.9, settings(epsilon=0.2, minimum_dim=64))
    assert choice[:2] == (1, 16)
