"""Decisions under a policy."""

from __future__ import annotations

import dataclasses

import torch

from psc_core import PSC
from psc_core.answers import ClassificationPolicy


def test_decisions_follow_the_policy(psc: PSC, digits: torch.Tensor) -> None:
    middle = float(psc.predict(digits).predictive_entropy.median())
    prediction = dataclasses.replace(
        psc, policy=ClassificationPolicy(alpha=0.5, ambiguity_threshold=middle, coverage=psc.policy.coverage)
    ).predict(digits)
    assert prediction.decision == tuple(
        "abstain_ood" if p <= 0.5 else "abstain_ambiguous" if h > middle else "accept"
        for p, h in zip(prediction.ood_p_value.tolist(), prediction.predictive_entropy.tolist(), strict=True)
    )
    assert len(set(prediction.decision)) == 3


def test_p_value_equal_to_alpha_is_ood(psc: PSC, digits: torch.Tensor) -> None:
    ranks = len(psc.calibration) + 1
    p_value = round(ranks * float(psc.predict(digits[:1]).ood_p_value)) / ranks  # Before it was rounded to float32.
    at, below = (
        dataclasses.replace(psc, policy=psc.policy.model_copy(update={"alpha": alpha}))
        for alpha in (p_value, p_value * (1 - 1e-6))
    )
    assert at.predict(digits[:1]).decision == ("abstain_ood",)
    assert at.predict(digits[:1]).is_ood.tolist() == [True]
    assert below.predict(digits[:1]).is_ood.tolist() == [False]


def test_what_is_no_number_is_not_accepted(psc: PSC, digits: torch.Tensor) -> None:
    open_to_all = dataclasses.replace(psc, policy=psc.policy.model_copy(update={"ambiguity_threshold": 9.0}))
    packed = psc.compute(digits[:4]).packed.numpy()
    outputs = psc.outputs(packed)
    outputs["ood_p_value"][:] = 1
    outputs["predictive_entropy"][1] = float("nan")
    names = [open_to_all.decide(outputs).decision_names[code] for code in open_to_all.decide(outputs).decision]
    assert names == ["accept", "abstain_ambiguous", "accept", "accept"]
