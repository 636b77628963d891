from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from psc_core.checks import (
    CHECKS,
    COUNTS_BELOW,
    MINIMUM_TAIL,
    REVIEWED,
    TEXTURE,
    CheckChoice,
    Checks,
    check_values,
    fit_checks,
    log_p_pieces,
    regret,
    tail_scales,
    vary,
)
from psc_core.checks import log_p_values as from_pieces
from psc_core.conformal import conformal_p_values, decision_p_value
from psc_core.errors import BundleError, FitError
from psc_core.linalg import TAIL_FRACTION
from tests.reference import checks as naive


def log_p_values(ascending: torch.Tensor, scales: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Of values (B, G)."""
    return from_pieces(ascending, log_p_pieces(ascending, scales), values.T.contiguous()).T


FINITE = st.floats(-1e6, 1e6, width=32)


@given(
    known=st.lists(FINITE, min_size=1, max_size=30),
    tested=st.lists(FINITE, min_size=1, max_size=10),
    scale=st.floats(2**-10, 1e4, width=32),
)
def test_matches_the_twin(known: list[float], tested: list[float], scale: float) -> None:
    values = torch.tensor([*tested, *known])
    ascending = torch.tensor(known).sort().values
    got = log_p_values(ascending[None], torch.tensor([scale]), values[:, None])[:, 0]
    expected = [naive.log_p_value(ascending.tolist(), scale, value) for value in values.tolist()]
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)


@given(known=st.lists(FINITE, min_size=2, max_size=30, unique=True), data=st.data())
def test_falls_without_jumps(known: list[float], data: st.DataObject) -> None:
    ascending = torch.tensor(known).sort().values
    at = data.draw(st.sampled_from(ascending.tolist()))
    below, above = (np.nextafter(np.float32(at), np.float32(end)).item() for end in (-np.inf, np.inf))
    scale = torch.tensor([max(1.0, (ascending[-1] - ascending[0]).item())])
    before, here, after = log_p_values(ascending[None], scale, torch.tensor([[below], [at], [above]]))[:, 0].tolist()
    assert before >= here >= after
    assert here == pytest.approx(math.log((len(known) - ascending.tolist().index(at)) / (len(known) + 1)))


def test_what_is_not_a_number_stays_so() -> None:
    got = log_p_values(torch.tensor([[0.0, 1.0]]), torch.tensor([1.0]), torch.tensor([[torch.nan], [torch.inf]]))
    assert got[0].isnan() and got[1] == -torch.inf


def dependent_values(images: int, generator: torch.Generator) -> torch.Tensor:
    """Four dependent values with tails from light to heavy."""
    shared = torch.randn(images, 1, generator=generator)
    own = torch.randn(images, 4, generator=generator)
    mixed = 0.8 * shared + 0.6 * own
    return torch.stack([mixed[:, 0], mixed[:, 1].exp(), mixed[:, 2] ** 3, mixed[:, 3].abs()], dim=1)


def test_score_matches_the_twin() -> None:
    generator = torch.Generator().manual_seed(0)
    selection, calibration, tested = (dependent_values(n, generator) for n in (50, 40, 30))
    checks = fit_checks(CHECKS, selection, calibration)
    log_p = [
        [naive.log_p_value(selection[:, g].tolist(), float(checks.scales[g]), float(row[g])) for g in range(4)]
        for row in tested
    ]
    expected = [naive.score(row, [COUNTS_BELOW[TEXTURE], 1, 1, COUNTS_BELOW[REVIEWED]]) for row in log_p]
    torch.testing.assert_close(checks.score(tested), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    everything = Checks(CHECKS, checks.ascending, checks.scales, checks.calibration)
    torch.testing.assert_close(everything.score(tested), -torch.tensor(log_p).sum(dim=1), rtol=1e-5, atol=1e-5)
    for g in range(4):
        expected = [(1 + int((calibration[:, g] >= row[g]).sum())) / 41 for row in tested]
        torch.testing.assert_close(checks.p_values(tested)[:, g], torch.tensor(expected))


@pytest.mark.parametrize(
    ("names", "selected", "n", "alpha"), [(CHECKS, 50, 99, 0.05), (CHECKS, 20, 38, 0.05), (CHECKS[:2], 200, 99, 0.1)]
)
def test_false_alarms_of_the_combined_score_are_beta_binomial(
    names: tuple[str, ...], selected: int, n: int, alpha: float
) -> None:
    """Mean and spread over fits are those of one exchangeable score, whatever the checks were fitted to."""
    generator = torch.Generator().manual_seed(2)
    fits, tested = 300, 300
    checks_of = [CHECKS.index(name) for name in names]
    counts = torch.zeros(fits, dtype=torch.float64)
    for fit in range(fits):
        selection, calibration, new = (dependent_values(m, generator)[:, checks_of] for m in (selected, n, tested))
        checks = fit_checks(names, selection, calibration)
        p_values = conformal_p_values(checks.score(calibration).sort().values, checks.score(new))
        counts[fit] = (p_values <= decision_p_value(alpha, n)).sum()
    rank = math.floor(alpha * (n + 1) + 1e-9)
    exact = stats.betabinom(tested, rank, n + 1 - rank)
    # The variance of a variance has the kurtosis in it.
    fourth = float(exact.stats(moments="k")) + 3
    spread = exact.var() * math.sqrt((fourth - 1) / fits)
    assert float(counts.mean()) == pytest.approx(exact.mean(), abs=4 * exact.std() / math.sqrt(fits))
    assert float(counts.var()) == pytest.approx(exact.var(), abs=4 * spread)


def test_only_an_unusual_texture_counts() -> None:
    values = torch.arange(1.0, 100.0)[:, None].expand(-1, 2)
    checks = fit_checks(["texture", "content"], values, values)
    content, texture = 50.0, torch.tensor([1.0, 50.0, 79.0, 90.0, 99.0])
    score = checks.score(torch.stack([texture, torch.full_like(texture, content)], dim=1))
    assert (score[:3] == score[0]).all() and (score[3:].diff() > 0).all() and score[3] > score[2]
    alone = fit_checks(["texture"], values[:, :1], values[:, :1])
    assert (alone.score(texture[:, None]).diff() > 0).all()


def test_reviewed_is_added_and_replaced() -> None:
    values = torch.arange(1.0, 100.0)[:, None].expand(-1, 2)
    checks = fit_checks(["texture", "content"], values, values)
    first, second = (checks.with_reviewed(scale * torch.arange(99.0)) for scale in (1, 3))
    replaced = first.with_reviewed(3 * torch.arange(99.0))
    assert replaced.names == ("texture", "content", "reviewed") and replaced.counts_below == second.counts_below
    tested = torch.tensor([[50.0, 50.0, 0.0], [50.0, 50.0, 270.0], [50.0, 50.0, 294.0]])
    assert torch.equal(replaced.score(tested), second.score(tested))
    assert torch.equal(second.score(tested[:1]), checks.score(tested[:1, :2]))  # It only ever adds.
    assert (second.score(tested).diff() >= 0).all() and second.score(tested)[2] > checks.score(tested[2:, :2])
    calibrated = second.calibrated_on(torch.cat([values.T, 3 * torch.arange(99.0)[None]]))
    assert calibrated.p_values(tested)[:, 2].tolist() == pytest.approx([1.0, 0.1, 0.02])


@settings(max_examples=30)
@given(known=st.integers(5, 60), count=st.integers(5, 1200), seed=st.integers(0, 2**16))
def test_other_numbers_of_values_give_the_same_p_values(known: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(known, 2, generator=generator)
    checks = fit_checks(["texture", "content"], values, values)
    other = Checks(checks.names, checks.resampled(count), checks.scales, checks.calibration)
    assert torch.equal(checks.resampled(known), checks.ascending)
    tested = torch.cat([values, 3 * values])
    ours, theirs = (log_p_values(each.ascending, each.scales, tested) for each in (other, checks))
    assert ((ours.exp() - theirs.exp()).abs() <= 1.01 / (min(known, count) + 1)).all()
    if count >= known:  # The tail is the same.
        far = (checks.ascending[:, -1] + 9 * checks.scales)[None]
        torch.testing.assert_close(*(log_p_values(each.ascending, each.scales, far) for each in (other, checks)))


def test_one_check_is_fitted_again() -> None:
    """The others keep their values, of which there are more."""
    generator = torch.Generator().manual_seed(0)
    values, few = torch.randn(1000, 2, generator=generator), 5 + 2 * torch.randn(25, 1, generator=generator)
    before = fit_checks(["content", "confidence"], values, values)
    after, alone = before.refitted("confidence", few[:, 0]), fit_checks(["confidence"], few, few)
    assert torch.equal(after.ascending[0], before.ascending[0]) and after.ascending.shape == (2, 1000)
    tested = torch.linspace(0, 20, 50)[:, None]
    ordinary = torch.full_like(tested, -10.0)
    torch.testing.assert_close(after.score(torch.cat([ordinary, tested], 1)), alone.score(tested), rtol=0.01, atol=0.02)


def test_values_are_higher_for_unusual_images() -> None:
    scores = {
        "log_density": torch.tensor([-1.0, -9.0]),
        "confidence": torch.tensor([0.1, 0.7]),
        "texture": torch.tensor([2.0, 3.0]),
        "reviewed": torch.tensor([4.0, 5.0]),
    }
    torch.testing.assert_close(check_values(CHECKS, scores), torch.tensor([[2.0, 1.0, 0.1, 4.0], [3.0, 9.0, 0.7, 5.0]]))
    torch.testing.assert_close(check_values(["content"], scores), torch.tensor([[1.0], [9.0]]))


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (["content", "texture"], {}),
        (["content", "content"], {}),
        (["content", "colour"], {}),
        ([], {}),
        (["content"], {"scales": torch.tensor([0.0])}),
        (["content"], {"scales": torch.tensor([1.0], dtype=torch.float64)}),
        (["content"], {"ascending": torch.tensor([[1.0, 0.0]])}),
        (["content"], {"calibration": torch.empty(1, 0)}),
        (["content"], {"calibration": torch.tensor([0.0, 1.0])}),
    ],
)
def test_what_is_no_check_is_rejected(names: list[str], changes: dict[str, torch.Tensor]) -> None:
    count = max(1, len(names))
    given = {"ascending": torch.tensor([[0.0, 1.0]] * count), "scales": torch.ones(count),
             "calibration": torch.tensor([[0.0, 1.0]] * count), **changes}  # fmt: skip
    with pytest.raises(BundleError, match="check"):
        Checks(names, **given)


@given(st.lists(st.floats(-1e5, 1e5, width=32), min_size=1, max_size=300))
def test_scale_matches_the_twin(values: list[float]) -> None:
    (got,) = tail_scales(torch.tensor(values).sort().values[:, None]).tolist()
    assert got == pytest.approx(naive.tail_scale(values, TAIL_FRACTION, MINIMUM_TAIL), rel=1e-5, abs=1e-30)


def test_values_that_cannot_rank_are_rejected() -> None:
    varied = torch.rand(5, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(FitError, match="those of confidence are all equal"):
        fit_checks(["content", "confidence"], varied * torch.tensor([1.0, 0.0]), varied)
    with pytest.raises(FitError, match="finite"):
        fit_checks(["content", "confidence"], varied, varied.log() - torch.inf)


@pytest.mark.parametrize(("steps", "varies"), [(0, False), (4, False), (4000, True)])
def test_values_that_differ_by_rounding_are_equal(steps: int, varies: bool) -> None:
    values = 30 + steps * torch.finfo(torch.float32).eps * 30 * torch.linspace(0, 1, 50)
    assert vary(values) is varies


CHOICE = CheckChoice(
    {
        "near": {"mixed": 0.9, "binary": 0.5},
        "far": {"mixed": 0.5, "binary": 1.0},
        "both": {"mixed": 0.8, "binary": 0.95},
        "best": {"mixed": 0.9, "binary": 1.0},
    },
    ("near", "far", "both"),
    "no image has several labels",
)


def test_least_regret_of_those_that_may_be_chosen_wins() -> None:
    assert CHOICE.chosen == "both"
    assert [round(regret(CHOICE.aurocs, name), 6) for name in CHOICE.aurocs] == [0.5, 0.4, 0.1, 0.0]
    assert replace(CHOICE, selectable=tuple(CHOICE.aurocs)).chosen == "best"
    (marked,) = (line for line in CHOICE.table().splitlines() if "◀ chosen" in line)
    assert marked.split()[0] == "both"


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=6).map(
        lambda rows: {f"option {i}": dict(zip(("near", "far"), row, strict=True)) for i, row in enumerate(rows)}
    )
)
def test_choice_and_its_json_against_a_loop(aurocs: dict[str, dict[str, float]]) -> None:
    choice = CheckChoice(aurocs, tuple(aurocs), "")
    best = {kind: max(auroc[kind] for auroc in aurocs.values()) for kind in ("near", "far")}
    worst = {name: max(best[kind] - own[kind] for kind in own) for name, own in aurocs.items()}
    assert worst[choice.chosen] == min(worst.values())
    told = json.loads(json.dumps(choice.to_json()))
    options = {each["checks"]: dict(zip(told["kinds"], each["auroc"], strict=True)) for each in told["options"]}
    assert (told["chosen"], told["regret"], options) == (choice.chosen, worst[choice.chosen], aurocs)
