"""Packing outputs."""

from __future__ import annotations

import pytest
import torch

from psc_core.answers import scores_of
from psc_core.tasks import TASKS
from psc_core.tasks.base import Outputs, pack


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("checks", [(), ("texture", "content")])
def test_pack_and_read_back(task: str, checks: tuple[str, ...]) -> None:
    names = scores_of(TASKS[task].answer_type)
    scores, probabilities, p_values = {name: torch.rand(3) for name in names}, torch.rand(3, 4), torch.rand(3, 2)
    outputs = Outputs(pack(names, scores, probabilities, [p_values] if checks else ()), names, checks)
    assert len(outputs) == 3
    assert torch.equal(outputs.probabilities, probabilities)
    assert torch.equal(outputs.check_p_values, p_values[:, : len(checks)])
    for name, values in scores.items():
        assert torch.equal(outputs[name], values)
