from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from psc_core.density import (
    DENSITIES,
    EXAMPLES,
    Density,
    Examples,
    class_counts,
    extend_density,
    fit_density,
    widen_density,
)
from psc_core.errors import FitError, UsageError
from psc_core.heads.base import Scored
from psc_core.learnt import LARGEST_TAKEN, AddedClass, fit_added, is_answer, log_odds, widen
from tests.reference import added_class as naive

EXTREMES = st.floats(-1e6, 1e6) | st.sampled_from([0.0, 1e30, -1e30])


def classes_of(kind: str, *, shift: float = 4.0, dim: int = 6) -> tuple[Density, torch.Tensor, torch.Tensor]:
    """A density of three classes, 200 images of each, and 100 images of a fourth."""
    generator = torch.Generator().manual_seed(1)
    centres, turn = shift * torch.randn(4, dim, generator=generator), torch.randn(dim, dim, generator=generator)
    labels = torch.arange(600) % 3
    features = (torch.randn(600, dim, generator=generator) + centres[labels]) @ turn + 5
    new = (torch.randn(100, dim, generator=generator) + centres[3]) @ turn + 5
    return fit_density(Examples(features, labels, 3), kind=kind), features, new


@given(
    w=st.lists(st.floats(-20, 20), min_size=2, max_size=2),
    means=st.lists(st.tuples(st.floats(-20, 20), st.floats(-20, 20)), min_size=3, max_size=6),
    slopes=st.lists(st.tuples(st.floats(0.01, 2), st.floats(-9, 9)), min_size=1, max_size=2),
)
def test_log_odds_are_those_of_the_twin(
    w: list[float], means: list[tuple[float, float]], slopes: list[tuple[float, float]]
) -> None:
    added = [AddedClass(10, *each) for each in slopes]
    found = log_odds(torch.tensor([w, [0.0, 0.0]]), torch.tensor(means, dtype=torch.float64), added)
    w = torch.tensor(w).double().tolist()
    np.testing.assert_allclose(found[0].numpy(), naive.log_odds(w, means, slopes), rtol=1e-4, atol=1e-3)
    alone = log_odds(torch.tensor([w]), torch.tensor(means, dtype=torch.float64), added)
    assert torch.equal(found[0], alone[0])  # whatever batch an image is in


@given(
    weights=st.lists(st.floats(1e-6, 1), min_size=2, max_size=5),
    odds=st.lists(st.floats(-20, 20), min_size=1, max_size=2),
)
def test_the_classes_before_keep_their_odds(weights: list[float], odds: list[float]) -> None:
    p = torch.tensor([weights], dtype=torch.float64) / sum(weights)
    scored = Scored({"epistemic": torch.tensor([0.3])}, p)
    scores, wide = widen(scored, torch.tensor([odds], dtype=torch.float64))
    expected, nats, epistemic = naive.widen(p[0].tolist(), 0.3, odds)
    np.testing.assert_allclose(wide[0].numpy(), expected, atol=1e-9)
    assert float(scores["predictive_entropy"]) == pytest.approx(nats, abs=1e-9)
    assert float(scores["epistemic"]) == pytest.approx(epistemic, abs=1e-6)


@given(odds=st.lists(EXTREMES, min_size=1, max_size=3), certain=st.booleans())
def test_extreme_odds_give_finite_results(odds: list[float], certain: bool) -> None:
    p = torch.tensor([[1.0, 0.0]]) if certain else torch.tensor([[0.5, 0.5]])
    scores, wide = widen(Scored({"epistemic": p[:, 1]}, p), torch.tensor([odds]))
    assert float(wide.sum()) == pytest.approx(1, abs=1e-5) and (wide >= 0).all()
    assert all(values.isfinite().all() for values in scores.values())


@pytest.mark.parametrize("kind", DENSITIES)
def test_a_density_gets_one_more_class(kind: str) -> None:
    density, features, new = classes_of(kind)
    wide = widen_density(density, new, examples=600)
    assert wide.record[EXAMPLES] == 700 and class_counts(wide, 700).tolist() == [200, 200, 200, 100]
    assert wide.sizes["classes"] == 4 and torch.equal(wide.basis, density.basis)
    before, after = density(features).class_log_joint, wide(features).class_log_joint
    torch.testing.assert_close(after[:, :3], before + np.log(600 / 700), rtol=1e-4, atol=1e-3)
    w = density.coordinates(new).double()
    mean, deviation = w.mean(0), density.coordinates(features).double()
    torch.testing.assert_close(wide.get_buffer("centres")[3], mean)
    covariance = torch.eye(w.shape[1], dtype=torch.float64)
    if "whiteners" in wide.layout:
        root = torch.linalg.inv(wide.whiteners[3].double())
        covariance = root @ root.mT
        sample = torch.cov(w.T)
        assert float(torch.trace(covariance)) == pytest.approx(float(torch.trace(sample)), rel=1e-3)
    gaussian = torch.distributions.MultivariateNormal(mean, covariance)
    if "whiteners" in wide.layout:
        root = torch.linalg.inv(wide.whiteners[0].double())
        covariance = root @ root.mT
    first = torch.distributions.MultivariateNormal(density.get_buffer("centres")[0], covariance)
    expected = gaussian.log_prob(deviation) - first.log_prob(deviation) + np.log(100 / 200)
    torch.testing.assert_close((after[:, 3] - after[:, 0]).double(), expected, rtol=1e-3, atol=1e-2)
    assert (wide(new).log_density > density(new).log_density).all()


def test_a_wider_density_is_extended_like_any_other() -> None:
    density, features, new = classes_of("tied")
    wide = widen_density(density, new[:50], examples=600)
    extended = extend_density(wide, new[50:], torch.full((50,), 3), examples=650).density
    assert class_counts(extended, 700).tolist() == [200, 200, 200, 100]
    labels = torch.cat([torch.arange(600) % 3, torch.full((100,), 3)])
    whole = fit_density(Examples(torch.cat([features, new]), labels, 4), kind="tied")
    ours, theirs = (each(torch.cat([features, new])).class_log_joint for each in (extended, whole))
    torch.testing.assert_close(ours, theirs, rtol=0.12, atol=0.5)  # The first 50 counted as of covariance I.


def fitted(shift: float, *, sure: float = 5.0) -> tuple[AddedClass, torch.Tensor, torch.Tensor, torch.Tensor]:
    density, features, new = classes_of("tied", shift=shift)
    w, probabilities = density.coordinates(features[:300]), (sure * torch.eye(3)[torch.arange(300) % 3]).softmax(1)
    return (*fit_added("hedgehog", density, density.coordinates(new), w, probabilities), probabilities)


def test_a_class_apart_is_recognised_and_takes_nothing() -> None:
    found, held, others, probabilities = fitted(4.0)
    assert found.images == 100 and found.slope > 0
    assert (held > 0).all() and not is_answer(others, probabilities).any()
    assert float(others.sigmoid().mean()) < 0.01  # It leaves no image in doubt.


@pytest.mark.parametrize("sure", [5.0, 0.5])
def test_a_class_that_overlaps_takes_few_right_answers(sure: float) -> None:
    found, held, others, probabilities = fitted(0.4, sure=sure)
    taken = is_answer(others, probabilities).double().mean()
    assert taken <= LARGEST_TAKEN and 0 < (held > 0).double().mean() < 1 and found.slope > 0


@pytest.mark.parametrize("count", [30, 100, 199])
def test_of_few_right_answers_none_is_taken_as_it_is_served(count: int) -> None:
    density, features, new = classes_of("tied", shift=0.4)
    for part in range(12):
        at = (torch.arange(count) + 17 * part) % 600
        w, p = density.coordinates(features[at]), (3 * torch.eye(3)[at % 3]).softmax(1)
        found, _, others = fit_added("hedgehog", density, density.coordinates(new), w, p)
        assert not is_answer(others, p).any()
        means = torch.cat([density.get_buffer("centres"), density.coordinates(new).double().mean(0)[None]])
        served = widen(Scored({"epistemic": torch.zeros(count)}, p), log_odds(w, means, [found])).probabilities
        assert torch.equal(served.argmax(1), p.argmax(1))


def test_images_that_nothing_tells_apart_are_refused() -> None:
    density, features, _ = classes_of("tied")
    w, probabilities = density.coordinates(features), torch.full((600, 3), 1 / 3)
    far = 40 * torch.nn.functional.normalize(torch.randn(10, w.shape[1], generator=torch.Generator().manual_seed(3)))
    with pytest.raises(UsageError, match="do not tell the 10 images of thing from those of the classes"):
        fit_added("thing", density, torch.cat([far[:5], -far[:5]]), w, probabilities)


@settings(max_examples=30)
@given(count=st.integers(10, 14), scale=st.sampled_from([0.0, 1e-6, 1.0, 1e4]), real=st.integers(0, 3))
def test_degenerate_images_are_fitted_or_refused(count: int, scale: float, real: int) -> None:
    density, features, _ = classes_of("gda++")
    new = features[:1] + scale * torch.randn(count, features.shape[1], generator=torch.Generator().manual_seed(count))
    w = density.coordinates(features[:real])
    try:
        found, held, _ = fit_added("thing", density, density.coordinates(new), w, torch.full((real, 3), 1 / 3))
    except UsageError:
        return
    assert np.isfinite([found.slope, found.bias]).all() and held.isfinite().all()
    assert widen_density(density, new, examples=600)(new).log_density.isfinite().all()


def test_images_that_are_not_finite_are_refused() -> None:
    density, _, new = classes_of("tied")
    with pytest.raises(FitError, match="expected finite features"):
        widen_density(density, new * torch.inf, examples=600)
