"""Decisions of a regression under a policy."""

from __future__ import annotations

import numpy as np
import pytest

from psc_core.answers import REGRESSION_DECISIONS, REGRESSION_SCORES, RegressionPolicy
from psc_core.tasks.base import Outputs
from psc_core.tasks.regression import Thresholds


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        (None, ["accept", "accept", "abstain_ood", "abstain_ood"]),
        (25.0, ["accept", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
        (20.0, ["accept", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
        (19.0, ["abstain_uncertain", "abstain_uncertain", "abstain_ood", "abstain_ood"]),
    ],
)
def test_the_policy_decides(limit: float | None, names: list[str]) -> None:
    """An interval as wide as the limit is accepted, a p-value equal to alpha is an alarm."""
    columns = {
        "mean": [10.0, -4.0, 1.0, 1.0], "aleatoric": [3.0, 6.0, 3.0, 60.0], "epistemic": [4.0, 8.0, 4.0, 80.0],
        "log_density": [0.0] * 4, "ood_score": [0.0] * 4, "ood_p_value": [0.9, 0.9, 0.05, 0.01],
    }  # fmt: skip
    outputs = Outputs(np.array([columns[name] for name in REGRESSION_SCORES], np.float32).T, REGRESSION_SCORES, ())
    policy = RegressionPolicy(alpha=0.05, max_width=limit, coverage=0.9)
    decisions = Thresholds(policy, float(np.float32(0.05)), 2.0).decide(outputs)
    assert [REGRESSION_DECISIONS[code] for code in decisions.decision] == names
    assert decisions.lower.tolist() == [0.0, -24.0, -9.0, -199.0]
    assert decisions.upper.tolist() == [20.0, 16.0, 11.0, 201.0]
    assert decisions.is_ood.tolist() == [False, False, True, True]


@pytest.mark.parametrize(("mean", "deviation"), [(1e6, 0.1), (40.0, 2.5), (0.0, 1.0)])
def test_an_interval_is_as_wide_as_its_ends_are_apart(mean: float, deviation: float) -> None:
    """Whoever sees only the ends of an answer finds the same decision, however much rounding took off its width."""
    rng = np.random.default_rng(0)
    columns = np.zeros((500, len(REGRESSION_SCORES)), np.float32)
    columns[:, REGRESSION_SCORES.index("mean")] = mean * (1 + rng.uniform(0, 1e-3, 500))
    columns[:, REGRESSION_SCORES.index("aleatoric")] = deviation * rng.uniform(0.9, 1.1, 500)
    columns[:, REGRESSION_SCORES.index("ood_p_value")] = 1
    policy = RegressionPolicy(alpha=0.05, max_width=float(np.float32(2 * deviation)), coverage=0.9)
    decided = Thresholds(policy, 0.05, 1.0).decide(Outputs(columns, REGRESSION_SCORES, ()))
    assert (decided.decision == (decided.upper - decided.lower > np.float32(2 * deviation))).all()
    assert set(decided.decision.tolist()) == {0, 1}


def test_a_limit_may_be_beyond_every_float32() -> None:
    columns = np.ones((2, len(REGRESSION_SCORES)), np.float32)
    policy = RegressionPolicy(alpha=0.05, max_width=1e300, coverage=0.9)
    assert Thresholds(policy, 0.05, 1.0).decide(Outputs(columns, REGRESSION_SCORES, ())).decision.tolist() == [0, 0]


def test_an_interval_beyond_every_float32_ends_at_the_last() -> None:
    columns = np.zeros((1, len(REGRESSION_SCORES)), np.float32)
    columns[:, REGRESSION_SCORES.index("aleatoric")] = 1e30
    columns[:, REGRESSION_SCORES.index("ood_p_value")] = 1
    policy = RegressionPolicy(alpha=0.05, max_width=None, coverage=0.9)
    decisions = Thresholds(policy, 0.05, 1e9).decide(Outputs(columns, REGRESSION_SCORES, ()))
    largest = np.finfo(np.float32).max
    assert [decisions.lower.tolist(), decisions.upper.tolist()] == [[-largest], [largest]]
