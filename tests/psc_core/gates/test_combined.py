"""Gates: one score whose alarms keep their rate, and a p-value each."""

from __future__ import annotations

import math

import pytest
import torch
from scipy import stats

from psc_core.conformal import conformal_p_values, decision_p_value
from psc_core.errors import BundleError
from psc_core.gates import GATES, TEXTURE_COUNTS_BELOW, Gates, fit_gates, readings_of
from tests.reference import gates as naive


def dependent_readings(images: int, generator: torch.Generator) -> torch.Tensor:
    """Three dependent readings with tails from light to heavy."""
    shared = torch.randn(images, 1, generator=generator)
    own = torch.randn(images, 3, generator=generator)
    mixed = 0.8 * shared + 0.6 * own
    return torch.stack([mixed[:, 0], mixed[:, 1].exp(), mixed[:, 2] ** 3], dim=1)


def test_score_matches_the_twin() -> None:
    generator = torch.Generator().manual_seed(0)
    selection, calibration, tested = (dependent_readings(n, generator) for n in (50, 40, 30))
    gates = fit_gates(GATES, selection, calibration)
    log_p = [
        [naive.log_p_value(selection[:, g].tolist(), float(gates.scales[g]), float(row[g])) for g in range(3)]
        for row in tested
    ]
    expected = [naive.score(row, [TEXTURE_COUNTS_BELOW, 1, 1]) for row in log_p]
    torch.testing.assert_close(gates.score(tested), torch.tensor(expected), rtol=1e-5, atol=1e-5)
    everything = Gates(GATES, gates.ascending, gates.scales, gates.calibration)
    torch.testing.assert_close(everything.score(tested), -torch.tensor(log_p).sum(dim=1), rtol=1e-5, atol=1e-5)
    for g in range(3):
        expected = [(1 + int((calibration[:, g] >= row[g]).sum())) / 41 for row in tested]
        torch.testing.assert_close(gates.p_values(tested)[:, g], torch.tensor(expected))


@pytest.mark.parametrize("alpha", [0.01, 0.05, 0.2])
def test_alpha_keeps_its_meaning(alpha: float) -> None:
    """Over fresh calibrations alarms on in-distribution images have a rate of at most alpha, for score and gates."""
    generator = torch.Generator().manual_seed(1)
    trials, tested = 200, 50
    alarms = torch.zeros(4)
    for _ in range(trials):
        gates = fit_gates(GATES, dependent_readings(60, generator), readings := dependent_readings(199, generator))
        new = dependent_readings(tested, generator)
        combined = conformal_p_values(gates.score(readings).sort().values, gates.score(new))
        alarms += torch.cat([combined[:, None], gates.p_values(new)], dim=1).le(alpha).sum(dim=0)
    rates = alarms / (trials * tested)
    # Images of one calibration alarm together: the spread is that of a Beta rate over trials, and binomial on top.
    spread = math.sqrt(stats.beta(200 * alpha, 200 * (1 - alpha)).var() / trials + alpha / (trials * tested))
    assert (rates <= alpha + 4 * spread).all() and (rates >= alpha - 1 / 200 - 4 * spread).all()


@pytest.mark.parametrize(
    ("names", "selected", "n", "alpha"),
    [(GATES, 50, 99, 0.05), (GATES, 20, 38, 0.05), (GATES[:2], 200, 99, 0.1)],
)
def test_false_alarms_of_the_combined_score_are_beta_binomial(
    names: tuple[str, ...], selected: int, n: int, alpha: float
) -> None:
    """Mean and spread over fits are those of one exchangeable score, whatever the gates were fitted to."""
    generator = torch.Generator().manual_seed(2)
    fits, tested = 300, 300
    gates_of = [GATES.index(name) for name in names]
    counts = torch.zeros(fits, dtype=torch.float64)
    for fit in range(fits):
        selection, calibration, new = (dependent_readings(m, generator)[:, gates_of] for m in (selected, n, tested))
        gates = fit_gates(names, selection, calibration)
        p_values = conformal_p_values(gates.score(calibration).sort().values, gates.score(new))
        counts[fit] = (p_values <= decision_p_value(alpha, n)).sum()
    rank = math.floor(alpha * (n + 1) + 1e-9)
    exact = stats.betabinom(tested, rank, n + 1 - rank)
    # The variance of a variance has the kurtosis in it.
    fourth = float(exact.stats(moments="k")) + 3
    spread = exact.var() * math.sqrt((fourth - 1) / fits)
    assert float(counts.mean()) == pytest.approx(exact.mean(), abs=4 * exact.std() / math.sqrt(fits))
    assert float(counts.var()) == pytest.approx(exact.var(), abs=4 * spread)


def test_only_a_strange_texture_counts() -> None:
    readings = torch.arange(1.0, 100.0)[:, None].expand(-1, 2)
    gates = fit_gates(["texture", "kind"], readings, readings)
    kind, texture = 50.0, torch.tensor([1.0, 50.0, 79.0, 90.0, 99.0])
    score = gates.score(torch.stack([texture, torch.full_like(texture, kind)], dim=1))
    assert (score[:3] == score[0]).all() and (score[3:].diff() > 0).all() and score[3] > score[2]
    alone = fit_gates(["texture"], readings[:, :1], readings[:, :1])
    assert (alone.score(texture[:, None]).diff() > 0).all()


def test_readings_are_higher_for_unusual_images() -> None:
    scores = {
        "log_density": torch.tensor([-1.0, -9.0]),
        "energy": torch.tensor([0.1, 0.7]),
        "texture": torch.tensor([2.0, 3.0]),
    }
    torch.testing.assert_close(readings_of(GATES, scores), torch.tensor([[2.0, 1.0, 0.1], [3.0, 9.0, 0.7]]))
    torch.testing.assert_close(readings_of(["kind"], scores), torch.tensor([[1.0], [9.0]]))


@pytest.mark.parametrize(
    ("names", "changes"),
    [
        (["kind", "texture"], {}),
        (["kind", "kind"], {}),
        (["kind", "colour"], {}),
        ([], {}),
        (["kind"], {"scales": torch.tensor([0.0])}),
        (["kind"], {"scales": torch.tensor([1.0], dtype=torch.float64)}),
        (["kind"], {"ascending": torch.tensor([[1.0, 0.0]])}),
        (["kind"], {"calibration": torch.empty(1, 0)}),
        (["kind"], {"calibration": torch.tensor([0.0, 1.0])}),
    ],
)
def test_what_is_no_gate_is_rejected(names: list[str], changes: dict[str, torch.Tensor]) -> None:
    count = max(1, len(names))
    given = {"ascending": torch.tensor([[0.0, 1.0]] * count), "scales": torch.ones(count),
             "calibration": torch.tensor([[0.0, 1.0]] * count), **changes}  # fmt: skip
    with pytest.raises(BundleError, match="gate"):
        Gates(names, **given)
