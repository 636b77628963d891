"""Weighted scores kept as equal ones, beside the weighted p-value by its definition."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psc_core.conformal import conformal_p_values, effective_count, equal_scores, thinned
from psc_core.errors import UsageError
from tests.reference import calibration as naive

FLOATS = st.one_of(st.sampled_from([-3.0, -1.5, 0.0, 0.125, 2.0]), st.floats(-1e6, 1e6, width=32))
WEIGHTED = st.lists(st.tuples(FLOATS, st.sampled_from([1, 2, 5, 20, 100])), min_size=1, max_size=60)


@given(WEIGHTED, st.lists(FLOATS, min_size=1, max_size=20))
def test_p_values_are_the_weighted_ones_rounded_up(images: list[tuple[float, int]], tested: list[float]) -> None:
    scores, weights = (list(part) for part in zip(*images, strict=True))
    given_weights = torch.tensor(weights, dtype=torch.float64)
    kept = torch.tensor(scores)[equal_scores(torch.tensor(scores), given_weights)]
    assert len(kept) == effective_count(given_weights) == math.floor(Fraction(sum(weights), max(weights)))
    assert (kept.diff() >= 0).all()
    tested += scores
    steps = (conformal_p_values(kept, torch.tensor(tested)) * (len(kept) + 1)).round().int().tolist()
    for score, step in zip(tested, steps, strict=True):
        exact = naive.weighted_p_value(scores, [Fraction(w) for w in weights], score)
        assert step == math.ceil(exact * (len(kept) + 1))


@given(st.lists(FLOATS, min_size=1, max_size=60), st.sampled_from([1.0, 3.0, 1 / 0.02]))
def test_equal_weights_change_nothing(scores: list[float], weight: float) -> None:
    all_of_them, weights = torch.tensor(scores), torch.full((len(scores),), weight)
    assert torch.equal(all_of_them[equal_scores(all_of_them, weights)], all_of_them.sort().values)
    assert torch.equal(all_of_them[equal_scores(all_of_them, None)], all_of_them.sort().values)
    assert thinned(weights).all()


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, -2.0], [1.0, math.nan], [math.inf]])
def test_rejects_weights_that_are_none(weights: list[float]) -> None:
    with pytest.raises(UsageError, match="a positive finite weight"):
        effective_count(torch.tensor(weights))


def test_the_rate_holds_in_the_population_that_was_drawn_from() -> None:
    """Unusual images are drawn rarely: equally weighted scores raise too many alarms, weighted ones α."""
    rates: dict[bool, list[float]] = {True: [], False: []}
    for seed in range(300):
        random = torch.Generator().manual_seed(seed)
        scores = torch.randn(4000, generator=random)
        probability = torch.where(scores > 1, 0.02, 0.1)
        drawn = torch.rand(4000, generator=random) < probability
        sample, weights = scores[drawn], 1 / probability[drawn]
        new = torch.randn(500, generator=random)
        for weighted, found in rates.items():
            kept = sample[equal_scores(sample, weights if weighted else None)]
            found.append(float((conformal_p_values(kept, new) <= 0.05).double().mean()))
    mean = {weighted: sum(found) / len(found) for weighted, found in rates.items()}
    assert 0.04 <= mean[True] <= 0.052
    assert mean[False] > 0.09


def test_thinned_images_count_equally() -> None:
    weights = torch.cat([torch.ones(5000), torch.full((500,), 10.0)])
    kept = thinned(weights)
    assert kept[5000:].all()
    assert int(kept[:5000].sum()) == pytest.approx(500, abs=80)


def test_of_no_images_none_is_drawn() -> None:
    assert thinned(torch.empty(0)).shape == (0,)
